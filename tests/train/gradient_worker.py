"""One rank of a run that writes its first optimizer step's gradients; started by test_strategies.py."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).resolve().parents[1])]

import torch  # noqa: E402
from deepspeed_on_cpu import CpuDeepSpeedStrategy  # noqa: E402

from trainer.checkpoint.tensorfile import save_safetensors  # noqa: E402
from trainer.config import CheckpointConfig, DataConfig, ModelConfig, RunConfig, TrainerConfig  # noqa: E402
from trainer.train import run as training  # noqa: E402
from trainer.train.lit_module import LitRWKV7  # noqa: E402
from trainer.train.strategy import check_gradients, deepspeed_config  # noqa: E402


class Recorder(LitRWKV7):
    """Writes the gradient instead of using it."""

    out: Path

    def initial_weights(self):
        weights = super().initial_weights()
        generator = torch.Generator().manual_seed(7)
        # The official zeros would hide gradients of most matrices.
        return {
            n: w + 0.05 * torch.randn(w.shape, generator=generator, dtype=torch.float32) for n, w in weights.items()
        }

    def _update(self, optimizer, clipped):
        if self.run.strategy.startswith("deepspeed"):
            from deepspeed.utils import safe_get_full_grad

            check_gradients(self)
            named = {n: safe_get_full_grad(p) for n, p in self.model.named_parameters()}
            grads = {n: g.clone() for n, g in named.items() if g is not None}
        else:
            grads = optimizer.optimizer.gradients()
        if self.trainer.is_global_zero:
            save_safetensors(self.out, {n: g.double() for n, g in grads.items()})
        optimizer.step()
        weights = {n: p.detach() for n, p in self.model.named_parameters()}
        if self.run.strategy.startswith("deepspeed"):
            from deepspeed.utils import safe_get_full_fp32_param

            weights = {n: safe_get_full_fp32_param(p) for n, p in self.model.named_parameters()}
        if self.trainer.is_global_zero:
            save_safetensors(self.out.with_suffix(".weights"), {n: w.double() for n, w in weights.items()})
        return 1.0


def main() -> None:
    options = json.loads(sys.argv[1])
    world = int(os.environ.get("WORLD_SIZE", "1"))
    folder = Path(options["folder"])
    run = RunConfig(
        model=ModelConfig(
            n_layer=2, n_embd=32, head_size=16, vocab_size=48, ctx_len=16, bptt_window=options["window"], kernel="chunked",
            grad_cp=options["grad_cp"], grad_clip=0.0, lr_init=0.01, warmup_steps=0,
        ),
        data=DataConfig(source="binidx", source_data_dir=options["data"], tokenizer="byte", test_split=0, dataloader_prefetch_factor=0),
        trainer=TrainerConfig(target_batch_size=4, microbatch_size=1),
        checkpoint=CheckpointConfig(dir=str(folder / "run"), every_steps=0),
        precision=options["precision"],
        strategy=options["strategy"],
        max_steps=1,
    )  # fmt: skip
    arguments = {"accelerator": "cpu", "devices": world, "enable_progress_bar": False}
    if run.strategy.startswith("deepspeed"):
        config = deepspeed_config(run)
        # Else parameters of a model this small would not be sharded at all.
        config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
        arguments["strategy"] = CpuDeepSpeedStrategy(config)
    Recorder.out = Path(options["out"])
    training.LitRWKV7 = Recorder
    training.Checkpointing.save = lambda *_: None
    training.execute("fit", run, arguments)


if __name__ == "__main__":
    main()
