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
    """Weights to start from: an official .pth, a .safetensors file, or a Hugging Face folder. Sizes and ranks are read from it. Leave it out, and give n_layer and n_embd, to start from fresh official initial weights."""
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
    lora: dict[str, Any] | None = None
    """Train adapters on frozen weights: {r: 16, alpha: 32, dropout: 0, targets: [..], init: zero}. Targets: att.receptance, att.key, att.value, att.output, ffn.key, ffn.value (default: all). init pissa: start from the largest singular values. Needs load_model. See docs/finetune.md."""
    train_parts: list[str] | None = None
    """Groups of parameters that are trained whole while all others are frozen (but for LoRA): emb, head, norms, gates, mixes, att, ffn. Default: everything, or nothing besides lora or state_tuning."""
    state_tuning: dict[str, bool] | None = None
    """Train the state before a document and nothing else: {shifts: false}; shifts: true trains the token-shift states too. Learning rates from 0.01 to 1. documents batching without packing. Needs load_model."""
    load_adapter: str | None = None
    """Folder of an adapter (or a checkpoint of a run that made one) to start from; its method and sizes must be those of lora, train_parts or state_tuning."""
    ctx_len: int = 2048
    """Tokens per chunk, a multiple of 16. GPU memory grows with it, document length does not matter. Raise it while memory allows: larger chunks run faster."""
    ctx_len_schedule: list[list[int]] | None = None
    """Chunk length by optimizer step: pairs [first step, tokens per chunk], such as [[0, 512], [1000, 2048]]; the last holds to the end. The data of a step stay the same, only how they are cut changes. None above ctx_len. With compile, each new length compiles anew."""
    ctx_len_cutoffs: list[int] | None = None
    """documents batching: most tokens of a document that are trained, in the stages that ctx_len_warmup_steps ends. A longer document is cut at a random place: what follows is left out, what comes before builds the state. Rising, such as [4096, 16384]."""
    ctx_len_warmup_steps: list[int] | None = None
    """Optimizer steps at which the stages of ctx_len_cutoffs end, such as [500, 2000]: documents are whole from the last one on."""
    bptt_window: BpttWindow = 1
    """How many chunks a gradient may cross: 1 = truncated at each chunk, n = windows of n chunks, `full` = exact through the whole document (or, in stream batching, through the optimizer step). GPU memory is the same for all; `full` costs about one more forward pass."""
    bptt_learning_range: int = -1
    """Only the last K chunks of each document are trained, earlier ones build the state; -1 = all. This is not a window: see bptt_window."""
    bptt_host_memory_gib: float = 8.0
    """Host memory, in GiB per process, that `bptt_window` > 1 may use for states at chunk borders. Above it every k-th state is kept and the others are recomputed."""
    kernel: Literal["auto", "cuda", "cuda_sequential", "chunked", "reference"] = "auto"
    """Which WKV-7 kernel runs: auto = cuda on a GPU with a compiler, else chunked (plain PyTorch, any device). cuda = tensor cores for bfloat16, cuda_sequential = float32 arithmetic, slower. reference = the token loop, for checking."""
    grad_cp: bool = True
    """Recompute each block in the backward pass instead of keeping its activations. Saves most of the memory for about a quarter of the speed."""
    compile: Literal["auto", "on", "off"] = "auto"
    """torch.compile per block, for full chunks. auto = on for a GPU with precision bf16, without DeepSpeed, and when all parameters are trained; off elsewhere. The first step takes about 15 s longer."""
    cuda_graphs: Literal["auto", "on", "off"] = "auto"
    """Replay full chunks on a GPU as CUDA graphs, which removes launch overhead at small batches and keeps the activations of one chunk allocated. auto = on without grad_cp, up to 16384 tokens per micro-batch and chunk, and when all parameters are trained; not used with DeepSpeed."""
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
    token_loss_threshold: float = 0.0
    """Tokens whose loss is below this are not trained, though they count in the reported loss and in what the step's loss is divided by; 0 = train all."""
    token_dropout_rate: float = 0.0
    """Share of the trained tokens that are left out, drawn anew each epoch (seeded); 0 = none."""
    l2wrap: float = 1e-4
    """Strength of the pull on the largest logit of each trained token (official 1e-4); 0 = off. Not part of the reported loss."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """`data:` where documents come from, how they become tokens, and how tokens become batches."""

    data_path: str | None = None
    """Folder of the prepared data set. Built from `source` by preload_datapath.py or at the start of fit. With source: binidx it may be left out."""
    data_path_storage_options: dict[str, Any] | None = None
    """Options of fsspec for a data_path such as s3://bucket/folder: {key, secret, endpoint_url}. They are never written anywhere; the environment (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY) is the safer place."""
    source: str | None = None
    """text | json | jsonl | csv | parquet | arrow | pandas | npy | binidx (with source_data_dir), or a path or URL (s3://...): a file, a folder, a pattern such as data/*.jsonl; or a .npy file, a .bin/.idx pair, a folder saved by datasets' save_to_disk; or the name of a data set of the Hugging Face Hub. Leave it out if data_path is already prepared."""
    source_data_dir: str | None = None
    """Folder (or file) that holds the source files; for binidx the prefix without .bin/.idx; for a Hub data set its data_dir."""
    source_dataset_params: dict[str, Any] | None = None
    """Further arguments of datasets.load_dataset, such as {data_files: "*.jsonl"}, {storage_options: {..}} of fsspec for remote files (never written anywhere), or, for the Hub, {name: .., revision: ..}."""
    source_dataset_split: str = "train"
    """Split of the source that becomes training data."""
    source_test_split: str | None = "auto"
    """Split of the source that validates; then test_split takes nothing from the training split. auto = the split named test, if data_files or a saved data set has one (as in the older trainer; of a Hub data set it must be named); null = none."""
    sources: list[dict[str, Any]] | None = None
    """Several sources in one data set: each entry holds the `data` settings in which it differs, and may hold name, and one of epochs (passes over it, 1), tokens (how many to take) or weight (its share of all tokens). The name is kept for losses per source."""
    datapack_config_path: str | None = None
    """A datapack file of the older trainer, read as `sources`."""
    streaming: bool = False
    """Read `source` while training and store nothing: for sets larger than the disk. With batching: stream only; leave out data_path. A resume continues exactly. docs/data.md says what differs."""
    streaming_shuffle_buffer: int = 10000
    """streaming: documents that are read ahead and shuffled together (the order of files is shuffled too); 0 = the order of the source. Each process holds up to twice as many, as token ids."""
    skip_datapath_setup: bool = False
    """Use data_path as it is; never build or check it against the source."""
    tokenizer: str = "world"
    """world (RWKV vocabulary of 2023-04-24), byte (0 = end of document, else byte + 1), neox, the path of a local Hugging Face tokenizer, or the name of one that is in the local cache of the Hub."""
    autoTokenizer: dict[str, Any] | None = None
    """Hugging Face tokenizers: {kwargs: {..}, props: {..}, add_special_tokens: false}: arguments of AutoTokenizer.from_pretrained (such as bos_token), attributes set afterwards, and whether each piece of text gets the tokenizer's special tokens. Code from the tokenizer's folder never runs."""
    world_add_endoftext_token: bool = True
    """Let the text `<|endoftext|>` encode to token 0 with the world tokenizer."""
    append_end_of_document: bool = True
    """End each document with token 0, as the official data does."""
    custom_text_key: str | None = None
    """Column that holds plain text, all of it trained. Default: the format is told from the columns and printed."""
    disable_prompt_completion_mask: bool = False
    """Columns prompt and completion: train the prompt too."""
    multi_column_keys: list[str] | None = None
    """Columns that are joined to one text; empty ones are left out. Default, where the source has them: instruction, input, output."""
    multi_column_prefix: list[str] | None = None
    """Text before each column, trained if the column is (the older trainer always trained it). Default: "Instruction:\\n", "Input:\\n", "Output:\\n", or nothing for other columns."""
    multi_column_suffix: list[str] | None = None
    """Text after each column, trained if the column is. Default: nothing."""
    multi_column_train_mask: list[bool] | None = None
    """Whether each column is trained. Default: true, false, true, or true for other columns."""
    multi_column_separator: str = "\n\n"
    """Text between two columns, trained if both are."""
    conversation_format: Literal["messages", "sharegpt", "iopairs", "sender"] | None = None
    """messages: a list of {role, content}. sharegpt: a list of {from, value}. iopairs: keys say who speaks. sender: a field says who speaks. Default: told from the columns (messages or sharegpt)."""
    conversation_key: str | None = None
    """Column with the list of turns. iopairs and sender: null = the record itself is the one turn."""
    conversation_input_key_prefix_map: dict[str, str] | None = None
    """iopairs: key of an utterance to the text before it."""
    conversation_input_key_mask: dict[str, bool] | None = None
    """iopairs: key to whether it is trained, together with its prefix and suffix; a key left out is."""
    conversation_input_key_map: dict[str, str] | None = None
    """sender: key of a turn's text to the text before it, in which {sender} stands for the sender's name."""
    conversation_sender_key: str | None = None
    """sender: field that names the sender of a turn."""
    conversation_sender_value_map: dict[str, str] | None = None
    """sender: name in the data to the name shown."""
    conversation_sender_mask: dict[str, bool] | None = None
    """sender: name in the data to whether its turns are trained; a name left out is."""
    conversation_sender_suffix: dict[str, str] | None = None
    """iopairs and sender: key or name in the data to the text after its turn."""
    conversation_end_of_conversation: str | None = None
    """iopairs and sender: text put once at the end, trained."""
    chat_template: str = "rwkv_g1"
    """messages and sharegpt: rwkv_g1 ("User: ..", "Assistant: ..", as released RWKV-7 models expect), jinja:FILE, or tokenizer (the template that data.tokenizer brings)."""
    roles_to_train: list[str] | None = None
    """messages and sharegpt: roles whose texts are trained, of system, user, assistant, tool. Default: assistant. A message's own `train: true|false` goes first."""
    train_on_end: bool = True
    """Train the end of a trained turn, and token 0 after it, so that the model learns to stop."""
    mask_history: bool = False
    """messages and sharegpt: of the messages to train, train only the last."""
    data_prefix_skip_mask: int = 0
    """The first so many tokens of each document (and of each block of text_rechunk) are not trained."""
    min_token_size: int = 2
    """Documents with fewer tokens are dropped and counted."""
    max_token_size: int = -1
    """Documents with more tokens are dropped and counted; -1 = no limit."""
    dataset_offset: float = -1
    """Leave out so many records at the start of the source: a share below 1, or a number; -1 = none."""
    dataset_length: float = -1
    """Use so many records after the offset: a share below 1, or a number; -1 = all. Handy to try a config on a large source."""
    text_rechunk_size: int = 4096
    """Tokens of a block of text_rechunk."""
    text_rechunk_auto: bool = False
    """Join the documents of plain-text sources and cut them into blocks of text_rechunk_size tokens; the last block may be shorter. The older trainer did so by default. Documents of any length train without it."""
    text_rechunk_force: bool = False
    """The same for sources of every kind."""
    packing_enable: bool = False
    """documents batching: put several documents into one row (state reset at each start), so that rows fill whole chunks."""
    packing_batchsize: int = 20160
    """Documents that are packed together; larger packs are fuller."""
    packing_chunksize: int | None = None
    """Rows are filled up to a multiple of so many tokens. Default: model.ctx_len."""
    packing_min_ctx_len: int = -1
    """Smallest length of a packed row in tokens; -1 = packing_chunksize."""
    packing_in_sequence: bool = False
    """Pack documents in their order, next fit, instead of best fit over shuffled ones."""
    sort_by_length: bool = False
    """Save and train documents in the order of their lengths; nothing is shuffled then."""
    sort_asc: bool = True
    """sort_by_length: shortest first."""
    reverse_train_dataset_before_save: bool = False
    """Reverse the order of the training documents."""
    test_split: float = 0.01
    """Share (below 1) or number of documents kept for validation; 0 = none."""
    test_split_shuffle: bool = False
    """Draw the validation documents at random (seeded) instead of taking the last ones."""
    dataloader_swap_train_test_split: bool = False
    """Train on the validation documents and validate on the others (to look for leaks)."""
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
    skip_batches: list[list[int]] | None = None
    """Data that are passed over without an update: [[epoch, first, last], ...], counted from 0 as messages about bad numbers and loss spikes name them. To go on from before a spike without the data that caused it."""


@dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    """Additions of ours to Lightning's `trainer:` section."""

    target_batch_size: int = -1
    """Rows per optimizer step over all processes; -1 = one micro-batch per process."""
    microbatch_size: int = 1
    """Rows per forward pass and process."""
    max_tokens: int = -1
    """Stop after this many trained tokens, and let the learning rate reach lr_final there; -1 = no limit."""
    deepspeed: dict[str, Any] | None = None
    """Settings of DeepSpeed over those of the strategy, such as {zero_optimization: {overlap_comm: true}, data_types: {grad_accum_dtype: bf16}}. What the trainer decides itself is refused with the reason; docs/many-gpus.md lists what may be given."""
    deterministic_order_seed: int = 3941088705
    """Seed of document order and of the validation split, apart from seed_everything so that the order survives a change of it."""
    skip_non_finite: int = 0
    """Steps in a row that may be left out, counted and without an update, because loss or gradient is not finite; 0 = the first one ends the run (exit code 5). Not with DeepSpeed."""
    loss_spikes: Literal["off", "log", "stop"] = "log"
    """Five losses in a row of twice the mean of the last 100 or more: say so, or end the run (exit code 5). off = do not look."""
    rerun_every_steps: int = 0
    """Every so many steps compute the gradients twice and compare the bits, to find faulty hardware (exit code 16); 0 = never. Costs one more step each time. Not with DeepSpeed."""
    start_timeout_s: float = 300
    """Seconds that the processes of a run may take to start and exchange a first message (exit code 6); 0 = no limit. Loading and checking data and checkpoints is part of it."""
    step_timeout_s: float = 1800
    """Seconds without the end of a step, a validation step or a save after which the run shows where its threads wait and ends (exit code 6); 0 = no limit."""


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
    on_failure: Literal["stop", "warn"] = "stop"
    """A checkpoint or a line of metrics that cannot be written ends the run (exit code 4), or is said and counted while training goes on. The last checkpoint, and that of a signal, always have to succeed. warn: not with DeepSpeed."""


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """All of a run's settings after parsing, mapping of older keys, and checking."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    resume: str = "never"
    """auto = continue from the newest valid checkpoint in checkpoint.dir, or start if there is none; never; or the path of one checkpoint. Newer checkpoints that a run does not continue from are moved to set-aside-N beside them once it trains."""
    precision: str = "bf16-mixed"
    """trainer.precision: bf16-mixed and bf16-true = bf16 weights in the forward pass, float32 master weights and moments; 32-true = float32; 64-true = float64 (tests)."""
    strategy: str = "auto"
    """trainer.strategy: auto, ddp, deepspeed_stage_1, deepspeed_stage_2, deepspeed_stage_3; with _offload after 2 or 3, masters and moments are on the host."""
    max_steps: int = -1
    """trainer.max_steps: optimizer steps of the whole run; -1 = no limit."""
    max_epochs: int | None = None
    """trainer.max_epochs: passes over the training documents."""
    accelerator: str = "auto"
    """trainer.accelerator: auto (a GPU if there is one), gpu, cpu, or another name that Lightning knows."""
    devices: int = 1
    """trainer.devices: processes, one per GPU. The command line also takes `auto`, -1 and lists of GPUs, and counts them."""
    num_nodes: int = 1
    """trainer.num_nodes: machines, each with trainer.devices processes; started by torchrun or SLURM (configs/cluster)."""
    seed: int = 3941088705
    """seed_everything: seed of initial weights and anything random."""
