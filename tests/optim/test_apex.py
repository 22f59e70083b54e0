"""fairseq's ``lamb`` and ``adam`` with NVIDIA's apex, which stand-ins with its interface replace: apex itself needs a GPU."""

from pathlib import Path

import pytest
import torch
from fairseq.dataclass.configs import FairseqConfig
from fairseq.optim import adam
from fairseq.optim.fp16_optimizer import FP16Optimizer
from forked_command import run_command
from interrupted_run import RUN, assert_same_bits, checkpoint, killed_at
from omegaconf import OmegaConf
from small_models import bf16_optimizer, small_amos

from amos_fairseq.optim.grouped_adam import GroupedAdamConfig

# The arguments and the state of apex.optimizers.FusedLAMB (1.0), whose kernels this replaces by "gradient descent by the sign".
APEX = """
import torch

class FusedLAMB(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-3, bias_correction=True, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.01, amsgrad=False):
        assert (betas, eps, weight_decay) == ((0.9, 0.98), 1e-6, 0.01)
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for parameter in group["params"]:
                first = self.state[parameter].setdefault("exp_avg", torch.zeros_like(parameter))
                first.lerp_(parameter.grad, 0.1)
                parameter -= group["lr"] * first.sign()
"""


@pytest.mark.slow
def test_lamb_trains_and_resumes(binarized_corpus: Path, tmp_path: Path) -> None:
    """Also on float32 copies of bf16: the same weights in one run and in two."""
    (tmp_path / "apex").mkdir()
    (tmp_path / "apex" / "__init__.py").touch()
    (tmp_path / "apex" / "optimizers.py").write_text(APEX)
    options = {"optimizer": "lamb", "lamb-betas": "(0.9, 0.98)", "lamb-eps": "1e-6", "weight-decay": "0.01"}
    flags = [*(f"--{name}={value}" for name, value in options.items()), "--bf16", "--disable-validation"]
    flags += ["--max-update", "4", "--save-interval-updates", "2"]
    for name in ("one", "two"):
        out = tmp_path / name if name == "one" else killed_at(2, tmp_path / "one", tmp_path / name)
        words = [str(binarized_corpus), *RUN, "--save-dir", str(out), *flags]
        run_command("fairseq_cli.train", words, env={"PYTHONPATH": str(tmp_path)})
        state = checkpoint(out)
        assert {group["step"] for group in state["last_optimizer_state"]["param_groups"]} == {4}
    assert_same_bits(state["model"], checkpoint(tmp_path / "one")["model"], "model")


class FusedAdam(torch.optim.AdamW):
    """The interface of the classes of ``fairseq.optim.fused_adam``: scale and flat parameters, float32 states."""

    supports_flat_params = supports_memory_efficient_fp16 = supports_step_with_scale = True

    def __init__(self, params, use_fp16_stats: bool, **settings) -> None:
        super().__init__(params, **settings)

    def step(self, closure=None, scale: float | torch.Tensor = 1.0) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = parameter.grad / scale
        super().step(closure)


def test_adam_takes_apex_and_updates_as_grouped_adam_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """bf16 weights of three updates against ``grouped_adam`` that decays all parameters: float32 copies, flat and not."""
    settings = {"lr": [0.01], "adam_betas": "(0.9, 0.98)", "adam_eps": 1e-6, "weight_decay": 0.1}
    grouped = GroupedAdamConfig(**settings, decay_all_parameters=True)
    cfg = OmegaConf.structured(FairseqConfig)
    cfg.common.bf16 = True
    OmegaConf.set_struct(cfg, False)
    cfg.optimizer = settings | {"_name": "adam", "use_old_adam": False, "tpu": False}

    def with_apex(parameters: list[torch.nn.Parameter]) -> FP16Optimizer:
        with monkeypatch.context() as patched:
            patched.setattr(adam, "get_fused_adam_class", lambda: FusedAdam)
            patched.setattr(torch.cuda, "is_available", lambda: True)
            return FP16Optimizer.build_optimizer(cfg, parameters)

    results = []
    for build in (lambda parameters: bf16_optimizer(grouped, parameters), with_apex):
        parameters = list(small_amos(generator_depths="1,2").bfloat16().parameters())
        wrapper = build(parameters)
        for _ in range(3):
            wrapper.zero_grad()
            wrapper.backward(sum((parameter.float() ** 2).sum() for parameter in parameters))
            wrapper.clip_grad_norm(1.0)
            wrapper.step()
        results.append((wrapper, parameters))
    assert isinstance(results[1][0].fp32_optimizer.optimizer, FusedAdam)
    for ours, theirs in zip(results[0][1], results[1][1], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2**-7, atol=0)  # the last bit of bfloat16
