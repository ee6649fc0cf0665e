"""The share of tokens that get other experts than in float32, if the routers of published sizes get bfloat16 inputs and weights.

python -m benchmarks.routing --out benchmarks/results/routing_cpu.json

The reference of DeepSeek-V3 is the router of transformers, which computes in float32; that of the others is a float32 matmul and
its largest logits. Inputs are normal numbers, weights are such that logits have a deviation of 1, and the balancing biases of
DeepSeek-V3 are uniform up to a bound on both sides.
"""

import argparse
import json
import os
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.figures import cpu_name
from titanlike.models.common.experts import Router, limit_to_groups
from titanlike.models.deepseek.config import DeepseekV3Config
from titanlike.models.gpt_oss.config import GptOssConfig
from titanlike.models.moe.config import MixtralConfig, MoeConfig, Qwen3MoeConfig
from titanlike.run.run_dir import versions

MODELS: dict[str, MoeConfig] = {
    f"{config.name} {size}": config(**config.sizes[size])
    for config, size in (
        (MixtralConfig, "8x7B"),
        (Qwen3MoeConfig, "30B-A3B"),
        (GptOssConfig, "20B"),
        (DeepseekV3Config, "671B"),
    )
}
BOUNDS = (0.1, 0.5, 1.0, 3.0)  # of the balancing biases
TOKENS = 8192


def router_of(config: MoeConfig, bound: float, generator: torch.Generator) -> Router:
    """Returns a router with weights in bfloat16, and biases in float32."""
    router = Router(config)
    with torch.no_grad():
        router.weight.normal_(0.0, config.dim**-0.5, generator=generator)
        if router.bias is not None:
            router.bias.normal_(generator=generator)
        router.to(torch.bfloat16)
        if router.expert_bias is not None:
            bias = torch.empty(config.num_experts).uniform_(-bound, bound, generator=generator)
            router.expert_bias = nn.Parameter(bias, requires_grad=False)
    return router


def in_bfloat16(router: Router, x: Tensor) -> Tensor:
    """Returns the experts of tokens (T, D) by logits and a balancing bias in bfloat16."""
    config, bias = router.config, router.expert_bias
    logits = F.linear(x, router.weight, router.bias).float()
    scores = logits.softmax(-1) if config.router_score == "softmax" else logits.sigmoid()
    ranking = scores if bias is None else scores + bias.bfloat16().float()
    if config.groups_per_token < config.num_expert_groups:
        ranking = limit_to_groups(ranking, config)
    return ranking.topk(config.experts_per_token, dim=-1).indices


def of_transformers(router: Router, x: Tensor) -> Tensor:
    """Returns the experts of tokens (T, D) by the router of transformers, in the dtypes that it has in a model in bfloat16."""
    from transformers import AutoConfig, AutoModelForCausalLM  # takes seconds, and only measurements need it

    config = router.config
    values = replace(config, num_layers=config.num_dense_layers + 1).to_hugging_face()
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(**values))
    mlp = model.model.layers[-1].mlp
    reference = (mlp.router if hasattr(mlp, "router") else mlp.gate).to_empty(device="cpu")
    if router.expert_bias is None:
        reference.to(torch.bfloat16)
    else:
        reference.e_score_correction_bias.copy_(router.expert_bias)
    reference.weight.copy_(router.weight)
    if router.bias is not None:
        reference.bias.copy_(router.bias)
    experts: Tensor = reference(x)[-1]
    return experts


def share_of_others(found: Tensor, expected: Tensor) -> float:
    """Returns the share of tokens whose experts are not the expected ones."""
    return (found.sort(-1).values != expected.sort(-1).values).any(-1).double().mean().item()


@torch.no_grad()
def measure(name: str, bound: float, tokens: int) -> dict[str, Any]:
    """Returns the shares of tokens with other experts than in float32."""
    config = MODELS[name]
    generator = torch.Generator().manual_seed(0)
    router = router_of(config, bound, generator)
    x = torch.randn(tokens, config.dim, generator=generator).bfloat16()
    theirs = of_transformers(router, x)
    reference = theirs
    if router.expert_bias is None:
        linear_bias = None if router.bias is None else router.bias.float()
        logits = F.linear(x.float(), router.weight.float(), linear_bias)
        reference = logits.topk(config.experts_per_token, dim=-1).indices
    row = {
        "model": name,
        "bias": bound,
        "in_bfloat16": share_of_others(in_bfloat16(router, x), reference),
        "transformers": share_of_others(theirs, reference),
        "titanlike": share_of_others(router(x[None]).indices[0], reference),
    }
    print(row, flush=True)
    return row


def table(measured: dict[str, Any]) -> str:
    """Returns the table of the documentation."""
    lines = [
        "| Model | Bound of the balancing bias | Logits and bias in bfloat16 | Transformers in bfloat16 | titanlike |",
        "|---|---|---|---|---|",
    ]
    for row in measured["rows"]:
        shares = " | ".join(f"{row[name]:.1%}" for name in ("in_bfloat16", "transformers", "titanlike"))
        lines.append(f"| {row['model']} | {row['bias'] or ''} | {shares} |")
    return "\n".join(lines)


def main() -> None:
    """Measures and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    bounds = {name: BOUNDS if config.has_expert_bias else (0.0,) for name, config in MODELS.items()}
    rows = [measure(name, bound, arguments.tokens) for name in MODELS for bound in bounds[name]]
    if arguments.out:
        report = {
            "command": f"python -m benchmarks.routing {shlex.join(sys.argv[1:])}",
            "machine": {"cpu": cpu_name(), "cores": os.cpu_count()},
            "versions": versions(),
            "tokens": arguments.tokens,
            "rows": rows,
        }
        arguments.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
