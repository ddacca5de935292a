"""The schema of a run: every key that a YAML file may hold, its default, unit and reason.

These dataclasses are the only place where settings are declared. `configs/example-full.yaml` and the
command line's `--help` are generated from them. Where the older infinite-context trainer had a name for
a setting, that name is the one used here. Rules that span several sections live in `checks.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

__all__ = ["BpttWindow", "CheckpointConfig", "DataConfig", "ModelConfig", "RunConfig", "TrainerConfig"]

BpttWindow = int | Literal["full"]


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """`model:` the network, how far gradients travel, and the optimizer."""

    load_model: str | None = None
    """Weights to start from: an official .pth or a .safetensors file. Sizes and ranks are read from it. Leave it out, and give n_layer and n_embd, to start from fresh official initial weights."""
    n_layer: int | None = None
    """Number of blocks. Needed only without load_model; otherwise it must match the file."""
    n_embd: int | None = None
    """Width of the residual stream; a multiple of head_size. Needed only without load_model."""
    vocab_size: int | None = None
    """Rows of the embedding. Default: that of the tokenizer (world 65536, byte 257 rounded up to 272)."""
    head_size: int = 64
    """Channels per head of the recurrent state; a multiple of 16. The CUDA kernel has 64; other sizes run the slower `chunked` kernel."""
    dim_ffn: int | None = None
    """Hidden width of channel mixing. Default: 4 x n_embd, as in all released RWKV-7 models."""
    lora_ranks: dict[str, int] | None = None
    """Ranks of the low-rank gates: {w: .., a: .., v: .., g: ..}. Default: the official rule; read from load_model when given."""
    ctx_len: int = 2048
    """Tokens per chunk, a multiple of 16. GPU memory grows with it, document length does not matter. Raise it while memory allows: larger chunks run faster."""
    bptt_window: BpttWindow = 1
    """How many chunks a gradient may cross: 1 = truncated at each chunk, n = windows of n chunks, `full` = exact through the whole document (or, in stream batching, through the optimizer step). GPU memory is the same for all; `full` costs about one more forward pass."""
    bptt_learning_range: int = -1
    """Only the last K chunks of each document are trained, earlier ones build the state; -1 = all. This is not a window: see bptt_window."""
    bptt_host_memory_gib: float = 8.0
    """Host memory, in GiB per process, that `bptt_window` > 1 may use for states at chunk borders. Above it every k-th state is kept and the others are recomputed."""
    kernel: Literal["auto", "cuda", "chunked", "reference"] = "auto"
    """Which WKV-7 kernel runs: auto = cuda on a GPU with a compiler, else chunked (plain PyTorch, any device). reference = the token loop, for checking."""
    grad_cp: bool = True
    """Recompute each block in the backward pass instead of keeping its activations. Saves most of the memory for about a quarter of the speed."""
    compile: Literal["auto", "on", "off"] = "off"
    """torch.compile per block. auto = on for a GPU with precision bf16, off elsewhere."""
    loss_chunk_rows: int = 4096
    """Rows of logits that exist at one time in the head and loss. Lower it to save memory (rows x vocab_size x 2 bytes in bf16)."""
    lr_init: float = 6e-4
    """Peak learning rate. Official values: 6e-4 for L12-D768, 4e-4 for L24-D1024, 3e-4 for L24-D2048; about 1e-5 for fine-tuning."""
    lr_final: float | None = None
    """Learning rate at the end of the run. Default: lr_init / 10 for cosine and linear schedules."""
    lr_schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """Shape of the decay from lr_init to lr_final. It counts tokens, so batch size and chunk length do not change it."""
    warmup_steps: int = 10
    """Optimizer steps over which the learning rate rises from 1 % of its value to all of it."""
    beta1: float = 0.9
    """Adam's decay of the mean of gradients."""
    beta2: float = 0.99
    """Adam's decay of the mean of squared gradients."""
    adam_eps: float = 1e-18
    """Adam's epsilon, added after the bias-corrected root. The official 1e-18 makes early steps act on the sign of the gradient."""
    weight_decay: float = 0.001
    """Decoupled decay of the large matrices only (emb, head, att.*.weight, ffn.*.weight), times the learning rate. Official: 0.001 (MiniPile) to 0.1 (Pile)."""
    grad_clip: float = 1.0
    """Global L2 norm above which gradients are scaled down; 0 = no clipping. Lower it if the loss spikes."""
    l2wrap: float = 1e-4
    """Strength of the pull on the largest logit of each trained token (official 1e-4); 0 = off. Not part of the reported loss."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """`data:` where documents come from, how they become tokens, and how tokens become batches."""

    data_path: str | None = None
    """Folder of the prepared data set. Built from `source` by preload_datapath.py or at the start of fit. With source: binidx it may be left out."""
    source: str | None = None
    """text | json | parquet | arrow | binidx, the path of one file or of a .bin/.idx pair, or a folder saved by datasets' save_to_disk. Leave it out if data_path is already prepared."""
    source_data_dir: str | None = None
    """Folder (or file) that holds the source files; for binidx the prefix without .bin/.idx."""
    source_dataset_params: dict[str, Any] | None = None
    """Further arguments of datasets.load_dataset, such as {data_files: "*.jsonl"}."""
    source_dataset_split: str = "train"
    """Split of the source that becomes training data."""
    skip_datapath_setup: bool = False
    """Use data_path as it is; never build or check it against the source."""
    tokenizer: str = "world"
    """world (RWKV vocabulary of 2023-04-24), byte (0 = end of document, else byte + 1), or a path of a local Hugging Face tokenizer."""
    world_add_endoftext_token: bool = True
    """Let the text `<|endoftext|>` encode to token 0 with the world tokenizer."""
    append_end_of_document: bool = True
    """End each document with token 0, as the official data does."""
    custom_text_key: str | None = None
    """Column that holds the text. Default: `text`."""
    min_token_size: int = 2
    """Documents with fewer tokens are dropped and counted."""
    max_token_size: int = -1
    """Documents with more tokens are dropped and counted; -1 = no limit."""
    test_split: float = 0.01
    """Share (below 1) or number of documents kept for validation; 0 = none."""
    test_split_shuffle: bool = False
    """Draw the validation documents at random (seeded) instead of taking the last ones."""
    num_proc: int = 1
    """Processes that tokenize."""
    batching: Literal["documents", "stream", "windows"] = "documents"
    """documents: a row is one document, from zero state. stream: a row is an endless lane of documents, state carried over steps and reset at document starts, no padding. windows: the official trainer's fixed windows of ctx_len tokens from the flat token stream, in its order."""
    chunks_per_step: int = 1
    """stream batching: chunks of ctx_len tokens per lane and optimizer step."""
    dataloader_shuffle_training: bool = True
    """Shuffle documents anew each epoch (seeded; the order depends on nothing but the seed and the epoch)."""
    dataloader_prefetch_factor: int = 4
    """Optimizer steps that are prepared ahead by a background thread; 0 = none."""
    dataloader_pin_memory: bool = True
    """Put batches into page-locked memory, so that copies to a GPU overlap with computing."""


@dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    """Additions of ours to Lightning's `trainer:` section."""

    target_batch_size: int = -1
    """Rows per optimizer step over all processes; -1 = one micro-batch per process."""
    microbatch_size: int = 1
    """Rows per forward pass and process."""
    max_tokens: int = -1
    """Stop after this many trained tokens, and let the learning rate reach lr_final there; -1 = no limit."""
    deterministic_order_seed: int = 3941088705
    """Seed of document order and of the validation split, apart from seed_everything so that the order survives a change of it."""


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """`checkpoint:` what is saved, when, and how much of it is kept."""

    dir: str | None = None
    """Folder of the checkpoints step-N. Default: runs/NAME, where NAME is the config file's name without .yaml (several are joined by +). One run per folder."""
    every_steps: int = 1000
    """Save every so many optimizer steps; 0 = only at the end."""
    every_minutes: float = 0
    """Save after so many minutes since the last save; 0 = do not look at the clock."""
    keep: int = 3
    """Newest checkpoints that are kept; older ones are removed after a newer one is safe. 0 = all."""
    best: bool = False
    """Also keep the checkpoint with the lowest validation loss."""


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """All of a run's settings after parsing, mapping of older keys, and checking."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    resume: str = "never"
    """auto = continue from the newest valid checkpoint in checkpoint.dir, or start if there is none; never; or the path of one checkpoint."""
    precision: str = "bf16-mixed"
    """trainer.precision: bf16-mixed and bf16-true = bf16 weights in the forward pass, float32 master weights and moments; 32-true = float32; 64-true = float64 (tests)."""
    strategy: str = "auto"
    """trainer.strategy: auto, ddp, deepspeed_stage_1, deepspeed_stage_2, deepspeed_stage_3."""
    max_steps: int = -1
    """trainer.max_steps: optimizer steps of the whole run; -1 = no limit."""
    max_epochs: int | None = None
    """trainer.max_epochs: passes over the training documents."""
    accelerator: str = "auto"
    """trainer.accelerator: auto (a GPU if there is one), gpu, cpu, or another name that Lightning knows."""
    devices: int = 1
    """trainer.devices: processes, one per GPU. The command line also takes `auto`, -1 and lists of GPUs, and counts them."""
    seed: int = 3941088705
    """seed_everything: seed of initial weights and anything random."""
