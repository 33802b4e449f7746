"""References by transformers itself, and a toy model of transformers whose faults are chosen."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import CausalLMOutput

import pcgsvc
from pcgsvc.forward.batch import Batch
from pcgsvc.forward.bundle import ModelBundle
from pcgsvc.models.catalog import build_model, validate_model
from pcgsvc.models.hf import source
from pcgsvc.serve.runner import Runner

CPU = torch.device("cpu")
CONFIGS = Path(source.__file__).with_name("configs")


def shipped_config(name: str) -> dict[str, Any]:
    """Return a shipped config's content."""
    values: dict[str, Any] = json.loads((CONFIGS / f"{name}.json").read_text())
    return values


def write_config(folder: Path, values: dict[str, Any]) -> Path:
    """Write a config.json of its own name."""
    path = folder / f"config_{len(list(folder.iterdir()))}.json"
    path.write_text(json.dumps(values))
    return path


def bundle_of(config: str | Path, **settings: Any) -> ModelBundle:
    """Validate and build a model on the CPU in fp32; settings are of `model.`."""
    overrides = [f"model.{name}={value}" for name, value in settings.items()]
    composed = pcgsvc.load_config(["model=hf", f"model.config={config}", *overrides])
    validate_model(composed)
    return build_model(composed, device=CPU, dtype=torch.float32)


def theirs(values: dict[str, Any], module: nn.Module) -> Any:
    """Return transformers' model of a config, as it makes it, with our model's weights."""
    values = dict(values)
    config = transformers.AutoConfig.for_model(values.pop("model_type"), **values)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    model.load_state_dict(module.model.state_dict())
    return model.eval()


@torch.no_grad()
def their_logits(model: Any, tokens: Sequence[int]) -> torch.Tensor:
    """Return logits [L, vocab] of one whole sequence."""
    ids = torch.tensor([tokens], device=model.device)
    logits: torch.Tensor = model(input_ids=ids).logits[0]
    return logits.cpu()


def forced_logits(
    runner: Runner, texts: Sequence[Sequence[int]], prompts: Sequence[int]
) -> list[torch.Tensor]:
    """Run texts through a runner: all prompts in one step, then token by token, all together.

    Args:
        runner: of a language model; its free KV blocks are used.
        texts: token ids; as many after the prompt in each.
        prompts: length of each prompt.

    Returns:
        Logits [steps, vocab] of each text, from the prompt's last token on.
    """
    geometry, device = runner.memory.geometry, runner.memory.device
    assert geometry is not None
    width = -(-max(map(len, texts)) // geometry.block_size)
    first = geometry.first_free_block
    tables = [[first + n * width + b for b in range(width)] for n in range(len(texts))]
    steps = len(texts[0]) - prompts[0]
    found: list[list[torch.Tensor]] = [[] for _ in texts]
    done = [0] * len(texts)
    for step in range(steps + 1):
        counts = list(prompts) if step == 0 else [1] * len(texts)
        ids = [
            t for text, at, n in zip(texts, done, counts, strict=True) for t in text[at : at + n]
        ]
        positions = [p for at, n in zip(done, counts, strict=True) for p in range(at, at + n)]
        done = [at + n for at, n in zip(done, counts, strict=True)]
        batch = Batch(query_lens=counts, seq_lens=done, block_tables=tables)
        inputs = (torch.tensor(values, device=device) for values in (ids, positions))
        logits = runner(*inputs, batch=batch).cpu()
        ends = torch.tensor(counts).cumsum(0) - 1
        for number, row in enumerate(logits[ends]):
            found[number].append(row)
    return [torch.stack(rows) for rows in found]


# ---- a model with faults to choose ---------------------------------------------------------------


class ToyConfig(transformers.PreTrainedConfig):
    """Config of `ToyForCausalLM`; `fault` says what its forward does that it should not."""

    model_type = "pcgsvc_toy"
    fault: str = "none"
    vocab_size: int = 64
    hidden_size: int = 16
    num_hidden_layers: int = 2
    max_position_embeddings: int = 64


class ToyAttention(nn.Module):
    """One head; `is_causal` as transformers' own layers have it."""

    is_causal = True

    def __init__(self, config: ToyConfig, layer_idx: int) -> None:
        super().__init__()
        self.config, self.layer_idx = config, layer_idx
        self.mixed = nn.Linear(config.hidden_size, 3 * config.hidden_size, bias=False)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        q, k, v = (part.unsqueeze(1) for part in self.mixed(x).chunk(3, dim=-1))
        settings: dict[str, Any] = {}
        fault = self.config.fault
        if fault == "sinks":
            settings["s_aux"] = x.new_zeros(1)
        if fault == "unknown":
            settings["temperature_of_the_day"] = 3.0
        if fault == "bias" and mask is not None:
            mask = mask + 1
        if fault == "bidirectional":
            settings["is_causal"] = False
        if fault == "latent":
            v = v[..., : v.shape[-1] // 2]
        if fault == "scales":
            settings["scaling"] = 0.1 * (1 + self.layer_idx)
        attend = transformers.AttentionInterface().get_interface(
            self.config._attn_implementation, _eager
        )
        out, _ = attend(self, q, k, v, mask, **({"scaling": 0.25} | settings))
        return torch.nn.functional.pad(out.flatten(2), (0, x.shape[-1] - out.shape[-1]))


def _eager(
    module: ToyAttention,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float,
    **settings: Any,
) -> tuple[torch.Tensor, None]:
    if module.config.fault == "eager":
        raise RuntimeError("no attention today")
    scores = q @ k.transpose(2, 3) * scaling + (0 if mask is None else mask)
    return (scores.softmax(-1) @ v).transpose(1, 2), None


class ToyForCausalLM(transformers.PreTrainedModel):
    """A decoder of two attention layers with learned positions."""

    config_class = ToyConfig
    _supports_sdpa = True
    _supports_attention_backend = True

    def __init__(self, config: ToyConfig) -> None:
        super().__init__(config)
        self.tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.places = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.layers = nn.ModuleList(
            ToyAttention(config, n) for n in range(config.num_hidden_layers)
        )
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        use_cache: bool = False,
    ) -> CausalLMOutput:
        fault = self.config.fault
        if position_ids is None or fault == "positions":
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device).unsqueeze(0)
        x = self.tokens(input_ids) + self.places(position_ids)
        mask = create_causal_mask(
            config=self.config,
            inputs_embeds=x,
            attention_mask=attention_mask,
            cache=None,
            position_ids=position_ids,
            or_mask_function=_first_four if fault == "prefix" else None,
        )
        if fault == "rows":
            x = x + 0.1 * x.cumsum(1)
        if fault == "branch" and x.isfinite().all():
            x = x * 2
        if fault != "no_attention":
            for layer in self.layers:
                x = x + layer(x, mask)
        return CausalLMOutput(logits=self.head(x))


def _first_four(batch: Any, head: Any, q: Any, k: Any) -> Any:
    return k < 4


def toy_config(folder: Path, fault: str) -> Path:
    """Register the toy with transformers and write a config with a fault."""
    transformers.AutoConfig.register("pcgsvc_toy", ToyConfig, exist_ok=True)
    transformers.AutoModelForCausalLM.register(ToyConfig, ToyForCausalLM, exist_ok=True)
    return write_config(folder, {"model_type": "pcgsvc_toy", "fault": fault})
