"""Shows that the default tests detect errors: plants one in each subsystem, runs its tests, and expects a failure.

    python -m tests.planted_errors             # all, about ten minutes
    python -m tests.planted_errors loss check  # some

The errors are planted in a copy of the repository. The exit code is 1 if an error is not detected.
"""

import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Planted:
    """An error: `old` is replaced by `new` in a file, and these default tests must fail."""

    file: str
    old: str
    new: str
    tests: str


ERRORS = {
    "jobs of other programs": Planted(
        "titanlike/tools/migration/torchtitan.py",
        "(step - (num_steps + 1 - length))",
        "(step - (num_steps - length))",
        "tests/unit/test_migration.py",
    ),
    "clusters of duplicates": Planted(
        "titanlike/tools/data/quality/duplicates.py",
        "starts[part.files] + part.numbers",
        "starts[part.files] + part.numbers // 2",
        "tests/unit/test_quality.py",
    ),
    "lines of many documents": Planted(
        "titanlike/tools/data/quality/lines.py",
        "found.append(hashes[is_first])",
        "found.append(hashes)",
        "tests/unit/test_quality.py",
    ),
    "best-fit packing": Planted(
        "titanlike/data/batches/best_fit.py",
        "loss_mask[firsts[self.continues[pieces]]] = False",
        "pass",
        "tests/unit/test_best_fit.py",
    ),
    "sharding": Planted(
        "titanlike/parallelisms/fsdp.py",
        "module.set_gradient_divide_factor(1.0)",
        "module.set_gradient_divide_factor(2.0)",
        "tests/distributed/test_parity.py",
    ),
    "loss": Planted(
        "titanlike/models/loss.py",
        "(*range(0, num_main, chunk), ",
        "(*range(0, max(chunk, num_main - chunk + 1), chunk), ",
        "tests/unit/test_loss.py",
    ),
    "shift of further tokens": Planted(
        "titanlike/data/batches/next_tokens.py",
        "= tokens[:, ahead:]",
        "= tokens[:, : tokens.shape[1] - ahead]",
        "tests/interop/test_multi_token.py",
    ),
    "documents of further tokens": Planted(
        "titanlike/data/batches/next_tokens.py",
        "if document_ids is not None:",
        "if document_ids is None:",
        "tests/interop/test_multi_token.py",
    ),
    "weight of further tokens": Planted(
        "titanlike/models/multi_token.py",
        "config.mtp_loss_weight / number",
        "config.mtp_loss_weight",
        "tests/interop/test_multi_token.py",
    ),
    "order of multi-token prediction": Planted(
        "titanlike/models/multi_token.py",
        "(self.enorm(embedding), self.hnorm(h))",
        "(self.hnorm(h), self.enorm(embedding))",
        "tests/interop/test_multi_token.py",
    ),
    "norm of multi-token prediction": Planted(
        "titanlike/models/multi_token.py",
        "self.hnorm(h)",
        "h",
        "tests/interop/test_multi_token.py",
    ),
    "gradient of further tokens": Planted(
        "titanlike/models/loss.py",
        "loss, z_term = inplace(logits, labels[rows], vocab_group, z_loss, soft_cap, scale)",
        "loss, z_term = inplace(logits, labels[rows], vocab_group, z_loss, soft_cap)",
        "tests/interop/test_multi_token.py",
    ),
    "balance of experts over ranks": Planted(
        "titanlike/models/experts.py",
        "return all_reduce_sum(torch.stack(loads), groups)",
        "return torch.stack(loads)",
        "tests/distributed/test_model_statistics.py",
    ),
    "balance of experts over pipeline stages": Planted(
        "titanlike/metrics/model_statistics.py",
        "dist.all_reduce(extremes, dist.ReduceOp.MAX, self.pipeline_group)",
        "pass",
        "tests/distributed/test_model_statistics.py",
    ),
    "load of each step": Planted(
        "titanlike/metrics/model_statistics.py",
        "            router.reset_load()",
        "            pass",
        "tests/distributed/test_model_statistics.py",
    ),
    "terms of the loss over ranks": Planted(
        "titanlike/metrics/model_statistics.py",
        "[dist.group.WORLD] if dist.group.WORLD is not None else []",
        "[]",
        "tests/distributed/test_model_statistics.py",
    ),
    "z-loss on its own": Planted(
        "titanlike/models/loss.py",
        "z_total = z_term if z_total is None or z_term is None else z_total + z_term",
        "z_total = z_term",
        "tests/distributed/test_model_statistics.py",
    ),
    "labels of the balance loss": Planted(
        "titanlike/models/experts.py",
        "self.terms.add(BALANCE_LOSS, auxiliary, num_own.sum())",
        "self.terms.add(BALANCE_LOSS, auxiliary, num_valid.sum())",
        "tests/distributed/test_model_statistics.py",
    ),
    "rank of a throttled GPU": Planted(
        "titanlike/metrics/monitor.py",
        "machines = [row[3:] for row in rows]",
        "machines = [machine for row in rows]",
        "tests/distributed/test_model_statistics.py",
    ),
    "power cap of a GPU": Planted(
        "titanlike/metrics/gpu.py",
        '    0x08: "hardware slowdown",',
        '    0x04: "hardware slowdown",',
        "tests/unit/test_machine_metrics.py",
    ),
    "rate of bytes": Planted(
        "titanlike/metrics/machine.py",
        "start, first = previous or samples[0]",
        "start, first = samples[0]",
        "tests/unit/test_machine_metrics.py",
    ),
    "throttling between samples": Planted(
        "titanlike/metrics/machine.py",
        "bits |= int(value)",
        "bits = int(value)",
        "tests/unit/test_machine_metrics.py",
    ),
    "memory of a container": Planted(
        "titanlike/metrics/host.py",
        "if limit is None or limit >= total:",
        "if True:",
        "tests/unit/test_machine_metrics.py",
    ),
    "QK-clip of rotated channels": Planted(
        "titanlike/optim/qk_clip.py",
        "factor[:, None].expand(-1, attention.rope_dim)",
        "root.expand(-1, attention.rope_dim)",
        "tests/unit/test_qk_clip.py",
    ),
    "QK-clip of groups": Planted(
        "titanlike/optim/qk_clip.py",
        "(grouped / of_group[:, None])",
        "grouped",
        "tests/unit/test_qk_clip.py",
    ),
    "QK-clip of several ranks": Planted(
        "titanlike/optim/qk_clip.py",
        "if mesh.size(dimension) > 1:",
        "if mesh.size(dimension) > 64:",
        "tests/distributed/test_moe.py",
    ),
    "positions of QK-clip": Planted(
        "titanlike/parallelisms/context.py",
        "return gather_sequence(k, 2, self.mesh), positions",
        "return gather_sequence(k, 2, self.mesh), positions.sort(descending=True).values",
        "tests/distributed/test_moe.py",
    ),
    "blocks of QK-clip": Planted(
        "titanlike/models/attention_logits.py",
        "end = min(first + rows, num_keys)",
        "end = min(max(first, 1), num_keys)",
        "tests/unit/test_qk_clip.py",
    ),
    "masked tokens": Planted(
        "titanlike/data/batches/masked_tokens.py",
        "labels = np.where(is_label, tokens, IGNORE)",
        "labels = np.where(is_label, changed, IGNORE)",
        "tests/unit/test_masked_tokens.py",
    ),
    "corrupted spans": Planted(
        "titanlike/data/batches/span_corruption.py",
        "np.minimum(number, self.spans.num_spans - 1)",
        "np.minimum(number + 1, self.spans.num_spans - 1)",
        "tests/unit/test_span_corruption.py",
    ),
    "pairs of texts": Planted(
        "titanlike/data/batches/seq2seq.py",
        "decoder_documents[row, offsets[1] :] = number",
        "decoder_documents[row, offsets[1] :] = 0",
        "tests/unit/test_span_corruption.py",
    ),
    "biases of positions": Planted(
        "titanlike/models/t5.py",
        "first = (distance > 0) * number",
        "first = (distance < 0) * number",
        "tests/interop/test_t5.py",
    ),
    "heads of biases": Planted(
        "titanlike/models/t5_config.py",
        'ParameterSpec(bias, "colwise_embedding", f"decoder',
        'ParameterSpec(bias, "position_embedding", f"decoder',
        "tests/distributed/test_encoder_decoders.py",
    ),
    "output of the encoder": Planted(
        "titanlike/models/t5_config.py",
        'gathered = ("layers.*.cross_attention", "encoder_output")',
        'gathered = ("layers.*.cross_attention",)',
        "tests/distributed/test_encoder_decoders.py",
    ),
    "windows on both sides": Planted(
        "titanlike/models/document_mask.py",
        "return (-(window // 2), window // 2)",
        "return (1 - (window // 2), window // 2)",
        "tests/unit/test_document_mask.py tests/unit/test_models.py",
    ),
    "chat labels": Planted(
        "titanlike/data/tokens/chat_template.py",
        "labels |= (ends > start) & (begins < end)",
        "labels |= (ends > start) & (ends < end)",
        "tests/unit/test_chats.py tests/unit/test_chat_template.py",
    ),
    "answers as inference renders them": Planted(
        "titanlike/data/tokens/chat_template.py",
        "if texts and prompt.startswith(done):",
        "if texts:",
        "tests/unit/test_chat_template.py tests/unit/test_chats.py",
    ),
    "documents of a conversation": Planted(
        "titanlike/data/batches/chats.py",
        "numbers[(chats.records % holdout_every",
        "numbers[(numbers % holdout_every",
        "tests/unit/test_chats.py",
    ),
    "messages without weight": Planted(
        "titanlike/data/documents/conversations.py",
        ' and message.get("weight", 1) != 0',
        "",
        "tests/unit/test_chat_formats.py tests/unit/test_chat_template.py",
    ),
    "special tokens": Planted(
        "titanlike/data/tokens/chat_template.py",
        "text = self._special.sub(lambda match:",
        "text = self._special.sub(lambda match: match[0] or",
        "tests/unit/test_chat_template.py",
    ),
    "conversations": Planted(
        "titanlike/data/batches/loader.py",
        '"document_ids": document_ids[:, :-1]}',
        '"document_ids": 0 * document_ids[:, :-1]}',
        "tests/interop/test_finetuning.py",
    ),
    "weights of tokens": Planted(
        "titanlike/models/token_losses.py",
        "ctx.soft_cap, scale[rows])",
        "ctx.soft_cap, scale[:ctx.chunk])",
        "tests/unit/test_preference_pairs.py",
    ),
    "halves of a pair": Planted(
        "titanlike/data/batches/pairs.py",
        "2 * (self.first_pair + pair) + side",
        "2 * (self.first_pair + pair) + 1 - side",
        "tests/unit/test_preference_pairs.py tests/interop/test_plain_dpo.py",
    ),
    "reference": Planted(
        "titanlike/run/reference.py",
        "module.reshard()",
        "module.modules()",
        "tests/distributed/test_preference_layouts.py",
    ),
    "QK-norm gradient": Planted(
        "titanlike/parallelisms/tensor.py",
        '"replicated": Style(LocalTokens),',
        '"replicated": Style(LocalTokens, partial_gradient=False),',
        "tests/distributed/test_families.py",
    ),
    "router gradient": Planted(
        "titanlike/parallelisms/tensor.py",
        '"router": Style(LocalTokens),',
        '"router": Style(LocalTokens, partial_gradient=False),',
        "tests/distributed/test_moe.py",
    ),
    "balance loss": Planted(
        "titanlike/parallelisms/tensor.py",
        "module.num_replicas = mesh.size()",
        "module.num_replicas = 1",
        "tests/distributed/test_moe.py",
    ),
    "balancing bias": Planted(
        "titanlike/models/experts.py",
        "self.load = load if self.load is None else self.load + load",
        "self.load = load",
        "tests/unit/test_experts.py",
    ),
    "precision of routers": Planted(
        "titanlike/models/experts.py",
        "_Float32Linear.apply(x.flatten(0, -2), self.weight.to(x.dtype))",
        "F.linear(x.flatten(0, -2), self.weight.to(x.dtype)).float()",
        "tests/unit/test_experts.py",
    ),
    "precision of the balancing bias": Planted(
        "titanlike/parallelisms/fsdp.py",
        "ignored_params=float32_parameters(model),",
        "",
        "tests/distributed/test_moe.py",
    ),
    "sinks": Planted(
        "titanlike/models/document_mask.py",
        "sinks.float().view(k.shape[1], -1, 1, 1)",
        "sinks.float().view(-1, k.shape[1]).t()[..., None, None]",
        "tests/unit/test_document_mask.py",
    ),
    "sinks of FlexAttention": Planted(
        "titanlike/models/document_mask.py",
        "(statistics.lse - sinks.float()",
        "(statistics.lse + sinks.float()",
        "tests/unit/test_document_mask.py",
    ),
    "sinks are left out": Planted(
        "titanlike/models/llama.py",
        "() if self.sinks is None else (self.sinks(),)",
        "() if self.sinks is None else (self.sinks() - 30.0,)",
        "tests/interop/test_transformers.py",
    ),
    "sinks of heads": Planted(
        "titanlike/parallelisms/tensor.py",
        '"head_parallel": Style(HeadParallel, Shard(0)),',
        '"head_parallel": Style(ColwiseLinear, Shard(0)),',
        "tests/distributed/test_moe.py",
    ),
    "sinks in the cache": Planted(
        "titanlike/tools/inference/kv_cache.py",
        "not self.soft_cap and sinks is None:",
        "not self.soft_cap:",
        "tests/inference/test_generation.py",
    ),
    "blocks with a window": Planted(
        "titanlike/models/gpt_oss_config.py",
        "index % 2 == 0",
        "index % 2 == 1",
        "tests/interop/test_transformers.py",
    ),
    "bounds of a gate": Planted(
        "titanlike/models/clamped_swiglu.py",
        "return x.clamp(-limit, limit).add_(1.0)",
        "return x.clamp(max=limit).add_(1.0)",
        "tests/unit/test_experts.py",
    ),
    "slope of a gate": Planted(
        "titanlike/models/clamped_swiglu.py",
        "SLOPE = 1.702",
        "SLOPE = 1.7",
        "tests/unit/test_experts.py",
    ),
    "gradient of a gate": Planted(
        "titanlike/models/clamped_swiglu.py",
        ".masked_fill_(gate > ctx.limit, 0.0)",
        "",
        "tests/unit/test_experts.py",
    ),
    "alternating matrices": Planted(
        "titanlike/interop/hf_parameters.py",
        "values[:, spec.part :: spec.num_parts]",
        "values.chunk(spec.num_parts, 1)[spec.part]",
        "tests/interop/test_transformers.py",
    ),
    "biases of experts": Planted(
        "titanlike/parallelisms/tensor.py",
        "{name: bias / self.mesh.size() for",
        "{name: bias * 1 for",
        "tests/distributed/test_moe.py",
    ),
    "gradient of biases": Planted(
        "titanlike/parallelisms/tensor.py",
        "parameter.placements[-1].is_replicate()",
        "parameter.placements[0].is_replicate()",
        "tests/distributed/test_moe.py",
    ),
    "decay of biases": Planted(
        "titanlike/optim/optimizer.py",
        'parameter.dim() >= 2 and not name.endswith("bias")',
        "parameter.dim() >= 2",
        "tests/unit/test_optimizer.py",
    ),
    "YaRN": Planted(
        "titanlike/models/rope_scaling.py",
        "    if config.rope_truncate:",
        "    if True:",
        "tests/interop/test_transformers.py",
    ),
    "factor of YaRN": Planted(
        "titanlike/models/gpt_oss_config.py",
        "(1.0 + 0.1 * math.log",
        "(1.0 + 0.2 * math.log",
        "tests/interop/test_transformers.py",
    ),
    "MXFP4": Planted(
        "titanlike/interop/mxfp4.py",
        "(VALUES[byte % 16], VALUES[byte // 16])",
        "(VALUES[byte // 16], VALUES[byte % 16])",
        "tests/interop/test_transformers.py",
    ),
    "LoRA gradient": Planted(
        "titanlike/parallelisms/tensor.py",
        "sums = (self.style.partial_gradient or name in LORA) and",
        "sums = self.style.partial_gradient and name not in LORA and",
        "tests/interop/test_finetuning.py",
    ),
    "LoRA merge": Planted(
        "titanlike/interop/weights.py",
        "self.lora.alpha / self.lora.rank *",
        "self.lora.alpha *",
        "tests/interop/test_finetuning.py",
    ),
    "resume": Planted(
        "titanlike/checkpoint/saver.py",
        'restore_generators(reader.read_header(files[file_of(dist.get_rank())]).notes["generators"])',
        "pass",
        "tests/faults",
    ),
    "optimizer values": Planted(
        "titanlike/checkpoint/loader.py", "    values.load(records)\n", "", "tests/distributed/test_own_optimizer.py"
    ),
    "commit": Planted(
        "titanlike/checkpoint/store.py",
        "        self._partial(step).rename(self.path / name_of(step))\n        fsync_directory(self.path)",
        "        shutil.copytree(self._partial(step), self.path / name_of(step))\n        shutil.rmtree(self._partial(step))",
        "tests/faults tests/distributed/test_saving.py",
    ),
    "data order": Planted(
        "titanlike/data/batches/shuffle.py",
        'derive_seed(seed, f"epoch {epoch}")',
        'derive_seed(seed, "epoch")',
        "tests/unit",
    ),
    "float8 scale": Planted(
        "titanlike/float8/weight_maxima.py",
        "dist.all_reduce(amax, dist.ReduceOp.MAX, group=group)",
        "pass",
        "tests/distributed/test_float8_layouts.py",
    ),
    "check": Planted(
        "titanlike/models/llama_config.py",
        '| {"num_kv_heads": self.num_kv_heads, "ffn_dim": self.ffn_dim}',
        '| {"ffn_dim": self.ffn_dim}',
        "tests/unit tests/recipes/test_mistakes.py",
    ),
    "launcher": Planted(
        "titanlike/distributed/torchrun.py",
        "return failure.exitcode if failure.exitcode > 0 else 1",
        "return 0 if failure.exitcode < 0 else failure.exitcode",
        "tests/recipes/test_run_train.py",
    ),
    "SageMaker request": Planted(
        "sagemaker/request.py",
        "round((job.max_hours + job.wait_hours) * 3600)",
        "round(job.wait_hours * 3600)",
        "tests/cloud/test_request.py",
    ),
    "verified gradients": Planted(
        "titanlike/tools/verify/comparison.py",
        "return 2 if kind in (BUFFERS, DROPOUT) else min(step, 1), step, KINDS.index(kind)",
        "return 2 if kind in (BUFFERS, DROPOUT) else min(step, 1), step, -KINDS.index(kind)",
        "tests/distributed/test_verify_module.py",
    ),
    "watchdog": Planted(
        "titanlike/distributed/watchdog.py",
        "return is_missing or not any(",
        "return not any(",
        "tests/unit/test_watchdog.py tests/faults/test_hang.py",
    ),
}


def detected_by(error: Planted, folder: Path) -> str:
    """Returns the first test that fails with the planted error, or an empty string."""
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(folder)], check=True)
    for changed in subprocess.run(
        ["git", "diff", "--name-only", "--diff-filter=AM", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines():
        (folder / changed).write_bytes((ROOT / changed).read_bytes())
    file = folder / error.file
    text = file.read_text()
    assert text.count(error.old) == 1, f"{error.file} does not contain exactly one {error.old!r}"
    file.write_text(text.replace(error.old, error.new))
    # This test finds every planted error, because it compares this file with the code.
    meta = "--deselect=tests/unit/test_structure.py::test_planted_errors_match_the_code"
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", meta, *error.tests.split()]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    failed = [line.split()[1] for line in done.stdout.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    return failed[0] if done.returncode and failed else ""


def main() -> int:
    """Plants the errors in sequence. Returns the exit code."""
    missed = 0
    for name in sys.argv[1:] or ERRORS:
        with tempfile.TemporaryDirectory(prefix="planted-") as folder:
            test = detected_by(ERRORS[name], Path(folder, "repository"))
        print(f"{name:<18} {test or 'NOT DETECTED'}", flush=True)
        missed += not test
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
