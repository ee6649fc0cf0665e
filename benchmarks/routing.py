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
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DeepseekV3Config as HFDeepseekV3Config
from transformers import GptOssConfig as HFGptOssConfig
from transformers import MixtralConfig as HFMixtralConfig
from transformers import Qwen3MoeConfig as HFQwen3MoeConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from benchmarks.figures import cpu_name
from titanlike.models.deepseek_config import DeepseekV3Config
from titanlike.models.experts import Router, limit_to_groups
from titanlike.models.gpt_oss_config import GptOssConfig
from titanlike.models.moe_config import MixtralConfig, MoeConfig, Qwen3MoeConfig
from titanlike.run.run_dir import versions

FAMILIES: dict[str, tuple[MoeConfig, type[nn.Module], type]] = {
    f"{config.name} {size}": (config(**config.sizes[size]), router, config_class)
    for config, size, router, config_class in (
        (MixtralConfig, "8x7B", MixtralTopKRouter, HFMixtralConfig),
        (Qwen3MoeConfig, "30B-A3B", Qwen3MoeTopKRouter, HFQwen3MoeConfig),
        (GptOssConfig, "20B", GptOssTopKRouter, HFGptOssConfig),
        (DeepseekV3Config, "671B", DeepseekV3TopkRouter, HFDeepseekV3Config),
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


def of_transformers(name: str, router: Router, x: Tensor) -> Tensor:
    """Returns the experts of tokens (T, D) by the router of transformers, in the dtypes that it has in a model in bfloat16."""
    config, router_class, config_class = FAMILIES[name]
    values = {name: value for name, value in config.to_hugging_face().items() if name != "architectures"}
    reference: Any = router_class(config_class(**values))
    if router.expert_bias is None:
        reference.to(torch.bfloat16)
    else:
        reference.e_score_correction_bias.copy_(router.expert_bias)
    reference.weight.copy_(router.weight)
    if router.bias is not None:
        reference.bias.copy_(router.bias)
    return reference(x)[-1]  # type: ignore[no-any-return]


def share_of_others(found: Tensor, expected: Tensor) -> float:
    """Returns the share of tokens whose experts are not the expected ones."""
    return (found.sort(-1).values != expected.sort(-1).values).any(-1).double().mean().item()


@torch.no_grad()
def measure(name: str, bound: float, tokens: int) -> dict[str, Any]:
    """Returns the shares of tokens with other experts than in float32."""
    config = FAMILIES[name][0]
    generator = torch.Generator().manual_seed(0)
    router = router_of(config, bound, generator)
    x = torch.randn(tokens, config.dim, generator=generator).bfloat16()
    theirs = of_transformers(name, router, x)
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


def main() -> None:
    """Measures and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    bounds = {name: BOUNDS if config.has_expert_bias else (0.0,) for name, (config, *_) in FAMILIES.items()}
    rows = [measure(name, bound, arguments.tokens) for name in FAMILIES for bound in bounds[name]]
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
