"""The loss of distillation against torch's `kl_div` and `cross_entropy`, whole, in chunks and over shards of the vocabulary."""

import dataclasses
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titanlike.config.distill import Distillation
from titanlike.losses import IGNORE
from titanlike.losses.chunked import Logits
from titanlike.losses.cross_entropy import CrossEntropy
from titanlike.losses.distillation import DistillationLoss, KeptLogits, distillation_loss
from titanlike.losses.top_k import top_k_of
from titanlike.models.common.layers import LMHead
from titanlike.run.distillation import set_distillation_loss

TOKENS, DIM, TEACHER_DIM, VOCAB = 12, 8, 10, 30


@dataclasses.dataclass
class Case:
    """Hidden states and heads of a student and a teacher, and labels of which some are ignored."""

    x: Tensor
    weight: Tensor
    labels: Tensor
    teacher: Logits

    @classmethod
    def drawn(cls, dtype: torch.dtype = torch.float32, soft_cap: float = 0.0) -> "Case":
        generator = torch.Generator().manual_seed(0)
        x, weight, teacher_x, teacher_weight = (
            torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
            for shape in ((1, TOKENS, DIM), (VOCAB, DIM), (1, TOKENS, TEACHER_DIM), (VOCAB, TEACHER_DIM))
        )
        labels = torch.randint(VOCAB, (1, TOKENS), generator=generator)
        labels[0, [0, 5]] = IGNORE
        return cls(
            x.requires_grad_(), weight.requires_grad_(), labels, Logits(teacher_x, teacher_weight, soft_cap=soft_cap)
        )


def bounded(logits: Tensor, cap: float) -> Tensor:
    """Returns logits with a soft cap; 0: none."""
    return (logits / cap).tanh() * cap if cap else logits


def expected(section: Distillation, case: Case, soft_cap: float) -> tuple[Tensor, Tensor]:
    """Returns the loss and the sums with the functions of torch, in float64."""
    valid, t = case.labels.flatten() != IGNORE, section.temperature
    logits = bounded(case.x.double() @ case.weight.double().t(), soft_cap)[0]
    weight: Any = case.teacher.weight
    teacher = bounded(case.teacher.x.double() @ weight.double().t(), case.teacher.soft_cap)[0]
    of_student, of_teacher = ((each[valid] / t).log_softmax(-1) for each in (logits, teacher))
    pair = (of_teacher, of_student) if section.loss == "reverse_kl" else (of_student, of_teacher)
    divergence = F.kl_div(*pair, reduction="sum", log_target=True)
    cross_entropy = F.cross_entropy(logits, case.labels.flatten(), ignore_index=IGNORE, reduction="sum")
    loss = (1 - section.label_weight) * t**2 * divergence + section.label_weight * cross_entropy
    return loss, torch.stack((divergence, cross_entropy)).detach()


SETTINGS = list(product(("forward_kl", "reverse_kl"), (1.0, 2.5), (0.0, 0.3), (0.0, 1.5)))


@pytest.mark.parametrize("chunk", [0, 5])
@pytest.mark.parametrize(("loss", "temperature", "label_weight", "soft_cap"), SETTINGS)
def test_loss_and_gradients_are_those_of_torch(
    loss: Any, temperature: float, label_weight: float, soft_cap: float, chunk: int
) -> None:
    section = Distillation(loss=loss, temperature=temperature, label_weight=label_weight)
    case, same = Case.drawn(soft_cap=soft_cap), Case.drawn(torch.float64, soft_cap)
    student = Logits(case.x, case.weight, soft_cap=soft_cap)
    found, sums = distillation_loss(section, student, case.labels, case.teacher, CrossEntropy(chunk=chunk))
    wanted, wanted_sums = expected(section, same, soft_cap)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(sums.double(), wanted_sums, rtol=1e-5, atol=1e-5)
    (found / 3).backward()
    (wanted / 3).backward()
    for name in ("x", "weight"):
        torch.testing.assert_close(getattr(case, name).grad.double(), getattr(same, name).grad, rtol=1e-4, atol=1e-5)
    assert not case.x.grad[0, [0, 5]].any()  # type: ignore[index]


def test_logits_in_place_of_hidden_states() -> None:
    section, case = Distillation(temperature=2.0), Case.drawn()
    logits = (case.x @ case.weight.t()).detach().requires_grad_()
    teacher_weight: Any = case.teacher.weight
    teacher = Logits(case.teacher.x @ teacher_weight.t())
    found, _ = distillation_loss(section, Logits(logits), case.labels, teacher, CrossEntropy(chunk=5))
    wanted, _ = distillation_loss(section, Logits(case.x, case.weight), case.labels, case.teacher, CrossEntropy())
    torch.testing.assert_close(found, wanted)
    found.backward()
    wanted.backward()
    torch.testing.assert_close(logits.grad @ case.weight, case.x.grad)  # type: ignore[operator]


def test_a_frozen_head_has_no_gradient() -> None:
    case = Case.drawn()
    weight = case.weight.detach()
    found, _ = distillation_loss(
        Distillation(), Logits(case.x, weight), case.labels, case.teacher, CrossEntropy(chunk=5)
    )
    found.backward()
    assert case.x.grad is not None and weight.grad is None


def test_the_loss_of_a_head() -> None:
    """It is the cross-entropy while there is no teacher."""
    case = Case.drawn()
    model = nn.ModuleDict({"output": LMHead(DIM, VOCAB)})
    head: Any = model["output"]
    head.weight.data.copy_(case.weight.detach())
    head.loss = CrossEntropy(chunk=5)
    loss = set_distillation_loss(model, Distillation(label_weight=0.25))
    assert isinstance(loss, DistillationLoss)
    cross_entropy = head(case.x, case.labels)
    kept = KeptLogits()
    kept(case.teacher, case.labels)
    loss.teacher = kept.found
    found = head(case.x, case.labels)
    assert loss.sums is not None
    torch.testing.assert_close(loss.sums[1], cross_entropy.detach())
    torch.testing.assert_close(found.detach(), 0.75 * loss.sums[0] + 0.25 * cross_entropy.detach())


@pytest.mark.parametrize("loss", ["forward_kl", "reverse_kl"])
def test_compiled_equals_eager(loss: Any) -> None:
    torch._dynamo.reset()
    section = Distillation(loss=loss, temperature=2.0)
    results = []
    for backend in ("", "aot_eager_decomp_partition"):
        case = Case.drawn()
        found, _ = distillation_loss(
            section, Logits(case.x, case.weight), case.labels, case.teacher, CrossEntropy(chunk=4, backend=backend)
        )
        found.backward()
        results.append((found.detach(), case.x.grad, case.weight.grad))
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("chunk", [0, 5])
@pytest.mark.parametrize(("loss", "temperature", "label_weight", "soft_cap"), SETTINGS)
def test_the_loss_of_the_likeliest_tokens_is_that_of_torch_over_their_and_one_more_event(
    loss: Any, temperature: float, label_weight: float, soft_cap: float, chunk: int
) -> None:
    section = Distillation(loss=loss, temperature=temperature, label_weight=label_weight)
    case, same = Case.drawn(soft_cap=soft_cap), Case.drawn(torch.float64, soft_cap)
    top_k = top_k_of(case.teacher, 6, temperature, chunk, None)
    student = Logits(case.x, case.weight, soft_cap=soft_cap)
    found, sums = distillation_loss(section, student, case.labels, top_k, CrossEntropy(chunk=chunk))
    valid = case.labels.flatten() != IGNORE
    weight: Any = same.teacher.weight
    logits = bounded(same.x @ same.weight.t(), soft_cap)[0]
    teacher = (bounded(same.teacher.x @ weight.t(), soft_cap)[0] / temperature).softmax(-1)
    ids = teacher.topk(6).indices
    assert torch.equal(ids, top_k.ids[0])
    events = [
        torch.cat((probs.gather(-1, ids), 1 - probs.gather(-1, ids).sum(-1, keepdim=True)), -1)[valid].log()
        for probs in ((logits / temperature).softmax(-1), teacher)
    ]
    divergence = F.kl_div(*(events[::-1] if loss == "reverse_kl" else events), reduction="sum", log_target=True)
    cross_entropy = F.cross_entropy(logits, case.labels.flatten(), ignore_index=IGNORE, reduction="sum")
    wanted = (1 - label_weight) * temperature**2 * divergence + label_weight * cross_entropy
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(sums.double(), torch.stack((divergence, cross_entropy)), rtol=1e-5, atol=1e-4)
    found.backward()
    wanted.backward()
    for name in ("x", "weight"):
        torch.testing.assert_close(getattr(case, name).grad.double(), getattr(same, name).grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("loss", ["forward_kl", "reverse_kl"])
def test_with_all_tokens_it_is_that_of_the_logits(loss: Any) -> None:
    section, results = Distillation(loss=loss, temperature=2.0), []
    for k in (0, VOCAB):
        case = Case.drawn()
        teacher = top_k_of(case.teacher, k, 2.0, 0, None) if k else case.teacher
        found, sums = distillation_loss(section, Logits(case.x, case.weight), case.labels, teacher, CrossEntropy())
        found.backward()
        results.append((found.detach(), sums, case.x.grad, case.weight.grad))
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)
