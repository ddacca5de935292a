"""From source files to batches of token ids.

`prepare` builds a data set once; `store` reads it; everything that needs datasets, pyarrow or transformers
imports them inside the functions that use them.
"""
