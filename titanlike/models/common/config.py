"""The base of model configs, and the tables of their parameters. Does not import torch.

`size` names a published variant; fields that the recipe gives take precedence over it.
"""

import ctypes
import math
from collections.abc import Collection, Iterable, Mapping
from itertools import pairwise
from typing import Annotated, Any, ClassVar, NamedTuple

from pydantic import Field
from typing_extensions import Self

from titanlike.config.base import UserError, divisors, one_of, validate

LOCAL, GLOBAL = "sliding_attention", "full_attention"  # types of blocks in Hugging Face's configs

MAX_LAYERS = 10_000
NumLayers = Annotated[int, Field(ge=1, le=MAX_LAYERS)]


def hides_keys(window: int, num_keys: int, *, causal: bool) -> bool:
    """Whether a window of this many tokens, up to the current one or around it, excludes some of the keys."""
    return 0 < window < num_keys if causal else 0 < window // 2 < num_keys - 1


class ParameterSpec(NamedTuple):
    """A parameter of a model: its shape, and what tensor parallelism and Hugging Face's checkpoints do with it."""

    shape: tuple[int, ...]
    style: str
    """The tensor-parallel style of its module; see `parallelisms/tensor.py`."""
    hf_name: str = ""
    """Name of the tensor in Hugging Face's checkpoints, in which the first `*` stands for the index of a block. A parameter is a
    stack of tensors, as the matrices of experts can be, if there is another `*`: the index in its first dimension."""
    part: int = 0
    """Which of several parameters that are stored as one tensor: in order along the output dimension; parts of stacks alternate."""
    parts: tuple[int, ...] = ()
    """Outputs of each of these parameters; those whose outputs alternate have the same number. Empty: it is stored by itself."""
    transposed: bool = False
    """Whether the matrix is stored as (inputs, outputs)."""
    keeps_float32: bool = False
    """Whether it has no gradient and stays in float32, as `float32_parameters` of its module says."""

    @property
    def is_stacked(self) -> bool:
        """Whether the parameter of a block is a stack of tensors."""
        return "*" in self.hf_name

    def at(self, index: int) -> "ParameterSpec":
        """Returns the parameter of one block, or one tensor of a stack."""
        return self._replace(hf_name=self.hf_name.replace("*", str(index), 1))


class TransformerConfig:
    """Base of model configs: what recipe checks, FLOP counts and the planner need to know of an architecture.

    A subclass is a `@section` with the annotated fields, a `name` of type `Literal`, and optionally `size` and `sizes`.
    `block_parameters` is the table of which counts, the tensor-parallel plan and names in other checkpoints are read.
    """

    name: str
    size: str = ""
    dim: int
    num_layers: int
    num_heads: int
    vocab_size: int
    max_seq_len: int
    tied_head: bool = False
    norm_eps: float
    dropout: float = 0.0
    balance_loss: float = 0.0

    sizes: ClassVar[dict[str, dict[str, Any]]] = {}
    defaults: ClassVar[Mapping[str, Any]] = {}
    """Defaults of inherited fields that differ from the base's."""
    logit_soft_cap: float = 0.0
    attention_soft_cap: float = 0.0
    has_sinks: ClassVar[bool] = False
    """Whether the softmax of each head of attention has a further logit in its denominator, which is a parameter."""
    sliding_window: int = 0
    num_experts: int = 0
    experts_per_token: int = 0
    causal: ClassVar[bool] = True
    """Whether a token attends to earlier tokens only, and the next token is predicted. Otherwise masked tokens are."""
    is_encoder_decoder: ClassVar[bool] = False
    """Whether an encoder reads the input, and a decoder, which attends to its output, predicts the next token of the target."""
    absent_parameters: ClassVar[tuple[str, ...]] = ()
    """Parameters that the table of a block has, and this one block has not."""
    num_dense_layers: int = 0
    num_mtp_layers: int = 0
    """Number of blocks of multi-token prediction, which come after the others."""
    hf_architecture: ClassVar[str] = ""
    """The class of transformers that computes the same; empty if there is none."""
    hf_ignored: ClassVar[tuple[str, ...]] = ()
    """Patterns of tensors in checkpoints of transformers that the model does not have."""

    def __init_subclass__(cls) -> None:
        # A variant of an architecture computes something else, unless it says otherwise.
        if "hf_architecture" not in cls.__dict__:
            cls.hf_architecture = ""

    @classmethod
    def has_field(cls, name: str) -> bool:
        """Whether a recipe can set this: an architecture whose published sizes agree in a value has it as a constant."""
        return name in getattr(cls, "__dataclass_fields__", {})

    @property
    def head_dim(self) -> int:
        """The dimension of an attention head. A subclass may have a field of this name instead."""
        return self.dim // self.num_heads

    @property
    def rotary_dim(self) -> int:
        """The number of channels of a head that RoPE rotates."""
        return self.head_dim

    @property
    def v_head_dim(self) -> int:
        """The dimension of a head of values, if it differs from the dimension of queries and keys."""
        return self.head_dim

    @property
    def num_kv_heads(self) -> int:
        """The number of key/value heads. A subclass may have a field of this name instead."""
        return self.num_heads

    def label(self) -> str:
        """Returns the architecture and the published size, or, if the recipe changes what the size sets, width and depth."""
        if self.size not in self.sizes:
            return self.name
        # A padded vocabulary, another context length or dropout is a common setting of the same size.
        names = ("vocab_size", "max_seq_len", *(("num_mtp_layers", "mtp_loss_weight") if self.num_mtp_layers else ()))
        common = {name: getattr(self, name) for name in names}
        if self.dropout:
            common["dropout"] = self.dropout
        if self == type(self)(**{"size": self.size, **self.sizes[self.size], **common}):
            return f"{self.name} {self.size}"
        return f"{self.name} of {self.num_layers} layers, model.dim {self.dim}"

    def is_local(self, index: int) -> bool:
        """Whether the attention of a block is limited to `sliding_window` tokens."""
        return False

    def layer_types(self) -> list[str]:
        """Returns the type of each block in Hugging Face's configs."""
        return [LOCAL if self.is_local(index) else GLOBAL for index in range(self.num_layers)]

    def num_local(self) -> int:
        """Returns the number of blocks with sliding-window attention."""
        return sum(map(self.is_local, range(self.num_layers)))

    def window_hides(self, seq_len: int) -> bool:
        """Whether the window excludes some keys of a sequence of this length."""
        return self.num_local() > 0 and hides_keys(self.sliding_window, seq_len, causal=self.causal)

    def first_parameters(self) -> dict[str, ParameterSpec]:
        """Returns the parameters before the blocks, by name: those that only the first pipeline stage has."""
        shape = (self.vocab_size, self.dim)
        return {"tok_embeddings.weight": ParameterSpec(shape, "vocab_parallel", "model.embed_tokens.weight")}

    def has_experts(self, index: int) -> bool:
        """Whether a block has experts: in a mixture of experts, all but the first `num_dense_layers`."""
        return self.num_experts > 0 and not 0 <= index < self.num_dense_layers

    def block_parameters(self) -> dict[str, ParameterSpec]:
        """Returns the parameters of a block, one with experts if there are any, by their names in it, in the module's order."""
        raise NotImplementedError

    def parameters_of(self, index: int) -> dict[str, ParameterSpec]:
        """Returns the parameters of one block by their names in it. -1 is the last one before multi-token prediction."""
        return self.block_parameters()

    def kinds_of_blocks(self) -> list[tuple[int, int]]:
        """Returns the index of the first block of each kind, and the number of blocks of this kind."""
        ends = (0, self.num_dense_layers, self.num_layers, self.num_layers + self.num_mtp_layers)
        return [(first, end - first) for first, end in pairwise(ends) if end > first]

    def kind_of_block(self, index: int) -> int:
        """Returns the index of the first block of the same kind."""
        return max(first for first, _ in self.kinds_of_blocks() if first <= index)

    def last_parameters(self) -> dict[str, ParameterSpec]:
        """Returns the parameters after the blocks, by name, including the LM head even if it is tied."""
        return {
            "norm.weight": ParameterSpec((self.dim,), "sequence_parallel", "model.norm.weight"),
            "output.weight": ParameterSpec((self.vocab_size, self.dim), "lm_head", "lm_head.weight"),
        }

    def parameters(self) -> dict[str, ParameterSpec]:
        """Returns the parameters of the model by name, in the order of the module."""
        blocks = {
            f"layers.{index}.{name}": spec.at(index)
            for index in range(self.num_layers + self.num_mtp_layers)
            for name, spec in self.parameters_of(index).items()
        }
        parameters = self.first_parameters() | blocks | self.last_parameters()
        if self.tied_head:
            del parameters["output.weight"]
        for name in self.absent_parameters:
            del parameters[name]
        return parameters

    def tensor_plan(self, blocks: Iterable[int] | None = None) -> dict[str, str]:
        """Returns the tensor-parallel style of each submodule, by name; `*` stands for the index of a block. `blocks` are the
        indices of those that a pipeline stage has."""
        kinds = (
            {first for first, _ in self.kinds_of_blocks()} if blocks is None else set(map(self.kind_of_block, blocks))
        )
        block = {f"layers.*.{name}": spec for i in sorted(kinds) for name, spec in self.parameters_of(i).items()}
        parameters = self.first_parameters() | block | self.last_parameters()
        inputs = dict.fromkeys(("layers.*.attention", "layers.*.feed_forward"), "all_gather_input")
        return inputs | {name.rpartition(".")[0]: spec.style for name, spec in parameters.items()}

    def block_matrices(self, index: int = -1, tensor: int = 1) -> dict[str, tuple[int, int]]:
        """Returns the linear layers of a block, by name, each as (outputs, inputs) of one of `tensor` tensor-parallel ranks: some
        outputs, some inputs of `rowwise_matrices`, or all of what is replicated."""
        return {
            name.removesuffix(".weight"): (
                spec.shape[0] // (tensor if spec.style == "colwise" else 1),
                spec.shape[1] // (tensor if spec.style == "rowwise" else 1),
            )
            for name, spec in self.parameters_of(index).items()
            if len(spec.shape) == 2 and spec.style in ("colwise", "rowwise", "replicated")
        }

    @property
    def rowwise_matrices(self) -> tuple[str, ...]:
        """Matrices of a block of which a tensor-parallel rank holds some inputs."""
        tables = [self.parameters_of(first) for first, _ in self.kinds_of_blocks()]
        names = [name for table in tables for name, spec in table.items() if spec.style == "rowwise"]
        return tuple(dict.fromkeys(name.removesuffix(".weight") for name in names if name.endswith(".weight")))

    def expert_parameters(self) -> dict[str, tuple[int, ...]]:
        """Returns the stacked matrices of a block's routed experts by parameter name, each as (experts, outputs, inputs)."""
        stacks = {name: spec.shape for name, spec in self.block_parameters().items() if spec.style == "experts"}
        return {name: shape for name, shape in stacks.items() if len(shape) == 3}

    def num_parameters(self) -> int:
        """Returns the number of parameters; an embedding tied to the LM head counts once."""
        ends = self.first_parameters() | self.last_parameters()
        tied = self.vocab_size * self.dim if self.tied_head else 0
        absent = {name: self.block_parameters()[name.split(".", 2)[2]] for name in self.absent_parameters}
        blocks = sum(number * num_elements(self.parameters_of(first)) for first, number in self.kinds_of_blocks())
        return blocks + num_elements(ends) - tied - num_elements(absent)

    def num_active_parameters(self) -> int:
        """Returns the number of parameters that compute a token, including the embedding."""
        return self.num_parameters()

    def matrices(self, tensor: int = 1) -> dict[str, tuple[int, int]]:
        """Returns the linear layers of all blocks by full name, as `block_matrices` does, and the LM head even if it is tied."""
        matrices = {
            f"layers.{index}.{name}": size
            for first, number in self.kinds_of_blocks()
            for kind in [self.block_matrices(first, tensor)]  # once: plans call this often
            for index in range(first, first + number)
            for name, size in kind.items()
        }
        return matrices | {"output": (self.vocab_size // tensor, self.dim)}

    def num_matmul_parameters(self) -> int:
        """Returns the number of parameters that multiply every token: all but lookup tables, norms and biases."""
        blocks = sum(
            number * math.prod(spec.shape)
            for first, number in self.kinds_of_blocks()
            for spec in self.parameters_of(first).values()
            if len(spec.shape) == 2 and spec.style != "experts"  # not of stacked biases
        )
        return blocks + self.num_head_parameters() * (1 + self.num_mtp_layers)

    def num_head_parameters(self) -> int:
        """Returns the number of these after the blocks: in the LM head, and in what transforms its input."""
        return num_elements({name: spec for name, spec in self.last_parameters().items() if len(spec.shape) == 2})

    def lm_head_cost(self) -> float:
        """Returns the cost of the LM head relative to one block."""
        head = self.num_head_parameters()
        return head * self.num_layers / (self.num_matmul_parameters() - head)

    def flops_per_token(self, seq_len: int, *, frozen: bool = False) -> int:
        """Returns FLOPs of the forward and backward pass, without recomputation, with full (not causal) attention, as published
        model FLOPs utilization counts them; with a sliding window, each token attends to all tokens of the window. Frozen
        weights have no gradients."""
        num_local = self.num_local()
        keys = (self.num_layers + self.num_mtp_layers - num_local) * seq_len + num_local * min(
            seq_len, self.sliding_window
        )
        attention = 6 * self.num_heads * (self.head_dim + self.v_head_dim) * keys
        return (4 if frozen else 6) * self.num_matmul_parameters() + attention

    def window_problems(self) -> list[str]:
        """Returns a message if no block has the sliding window."""
        if not self.sliding_window or self.num_local():
            return []
        return [
            f"model.sliding_window = {self.sliding_window} has no effect: all {self.num_layers} blocks attend to the full "
            "sequence; set model.sliding_window = 0"
        ]

    def problems(self) -> list[str]:
        """Returns one message for each inconsistency among the fields."""
        if self.dim % self.num_heads == 0:
            return []
        near = [n for n in divisors(self.dim) if n <= 2 * self.num_heads]
        return [f"model.num_heads = {self.num_heads} does not divide model.dim = {self.dim}; use {one_of(near[-4:])}"]

    def expert_parallel_problems(self, expert: int) -> list[str]:
        """Returns a message if the experts cannot be distributed over this number of ranks."""
        if expert == 1:
            return []
        return [f"parallelism.expert = {expert}, but model.name = {self.name!r} has no experts; use 1"]

    def to_hugging_face(self) -> dict[str, Any]:
        """Returns what describes this model in Hugging Face's `config.json`."""
        raise UserError(f"model.name = {self.name!r} has no equivalent in transformers; it cannot be exported")

    def not_exportable(self, name: str, supported: str) -> UserError:
        """Returns the error of a field whose value the class of transformers cannot have, with the values that it can."""
        return UserError(
            f"model.{name} = {getattr(self, name)!r} has no equivalent in {self.hf_architecture}; it cannot be exported, only "
            f"{supported} can"
        )

    @classmethod
    def fields_from_hugging_face(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the fields that a `config.json` describes. Raises `ValueError` for what this architecture does not have."""
        raise ValueError(f"model.name = {cls.name!r} has no equivalent in transformers")

    def hf_copies(self) -> dict[str, str]:
        """Returns further tensors of Hugging Face's checkpoints, by name, each with the parameter that it equals."""
        return {}

    def with_stored(self, names: Collection[str]) -> Self:
        """Returns the config with what the names of the tensors in a Hugging Face checkpoint say, and `config.json` does not."""
        return self

    @classmethod
    def hf_name_of(cls, stored: str) -> str:
        """Returns the name in the table of parameters of a tensor in a Hugging Face checkpoint."""
        return stored

    @classmethod
    def from_hugging_face(cls, values: Mapping[str, Any]) -> Self:
        """Returns the config that a `config.json` describes. Raises `ValueError` for what this architecture does not have."""
        config = cls.published(cls.fields_from_hugging_face(values))
        if (kinds := values.get("layer_types")) and kinds != config.layer_types():
            raise ValueError(f"layer_types = {kinds!r} has no fixed pattern, which is not supported")
        return config

    @classmethod
    def published(cls, fields: Mapping[str, Any]) -> Self:
        """Returns the config with these fields, under the name of the published size that has them if there is one."""
        config = validate(cls, fields)
        for size, values in cls.sizes.items():
            if values and all(equal(getattr(config, key), value) for key, value in values.items()):
                return validate(cls, {**fields, "size": size})
        return config

    def tensor_parallel_sizes(self) -> dict[str, int]:
        """Returns the fields that `parallelism.tensor` must divide."""
        return {"num_heads": self.num_heads, "vocab_size": self.vocab_size}


def num_elements(parameters: Mapping[str, ParameterSpec]) -> int:
    """Returns the number of elements of parameters."""
    return sum(math.prod(spec.shape) for spec in parameters.values())


def equal(found: Any, expected: Any) -> bool:
    """Whether two values of a config are equal, numbers in float32, in which GGUF files hold 1e-6 as 9.999999974752427e-07."""
    if isinstance(found, int | float) and isinstance(expected, int | float) and float in (type(found), type(expected)):
        return ctypes.c_float(found).value == ctypes.c_float(expected).value
    return bool(found == expected)


def require(values: Mapping[str, Any], **supported: Any) -> None:
    """Raises `ValueError` if a key of a `config.json` is present with another value than the only one that is supported."""
    for key, only in supported.items():
        found = values.get(key)
        if found is not None and not equal(found, only):
            raise ValueError(f"{key} = {found!r} is not supported; only {only!r} is")
