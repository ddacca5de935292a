"""Measuring a model: loss by position in a document, recall over long contexts, tasks of lm-evaluation-harness."""
