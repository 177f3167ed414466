"""LinearProducts: products with a model's weights on an x86 processor by oneDNN, for the time of an engine's passes.

torch gives float32 products to MKL, which on a processor of AMD takes more than twice as long as oneDNN, and gives
bfloat16 products to oneDNN with the weights in rows, which are brought into oneDNN's order again at each call. Here
every plain linear layer of a model has its weights packed in that order once, where memory is left for a copy of them.
On an AMD EPYC, one thread, 4,000 x 512, microseconds:

    ==================  ======  ======  ======  ========
    tokens              1       4       16      64
    ==================  ======  ======  ======  ========
    float32, torch      106     347     748     2,660
    float32, in rows    90      221     415     1,226
    float32, packed     91      92      271     1,041
    bfloat16, torch     121     124     221     584
    bfloat16, packed    57      58      148     522
    ==================  ======  ======  ======  ========

oneDNN compiles code for each number of tokens, some 0.3 MiB, and keeps 1,024 of them. So tokens are padded to one of
four numbers an octave, at most a quarter more: steps of all sizes up to 2,048 tokens share 40 of them.

A processor with neither AVX-512 nor AVX-NE-CONVERT has no such products in bfloat16: torch computes them there.

Layers with hooks keep them. A layer whose class is not torch's own (quantised, with an adapter), or whose weights are a
tensor of another class, computes as it does. Weights are packed again when torch counts a change of them, and at each
new epoch of weights, since changes through ``.data`` are not counted.
"""

import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, NamedTuple, final

import torch
from torch import nn
from torch.nn.functional import linear, pad

from pagedkv.engine.memory_use import free_nbytes
from pagedkv.probe import compat

FEW_TOKENS: Final = 16
"""Fewer float32 products than these are not worth bringing the weights into another order."""
SHARE_OF_MEMORY: Final = 0.5
"""Of the free memory of the machine, that copies of weights may take."""


class _Packed(NamedTuple):
    weight: torch.Tensor
    version: int
    copy: torch.Tensor


@final
class LinearProducts:
    """The linear layers of a model, as an engine computes them.

    Args:
        model: on any device; others may use it between passes.

    Attributes:
        packed_nbytes: bytes of the copies that are made when layers are first called; 0: there are none.
    """

    def __init__(self, model: compat.Model) -> None:
        layers = list(_plain_layers(model)) if _has_onednn(model.device) else []
        nbytes = sum(each.weight.nbytes for each in {id(layer.weight): layer for layer in layers}.values())
        self.packed_nbytes = nbytes if nbytes <= SHARE_OF_MEMORY * free_nbytes(torch.device("cpu")) else 0
        self._packed: dict[int, _Packed] = {}
        self._forwards = [(vars(layer), self._forward_of(layer)) for layer in layers]

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Make the model's layers compute so, within a context in which the engine has borrowed the model."""
        try:
            for attributes, forward in self._forwards:
                attributes["forward"] = forward  # an attribute of this object; the class has its own
            yield
        finally:
            for attributes, _ in self._forwards:
                attributes.pop("forward", None)

    def read_again(self) -> None:
        """Pack the model's present weights at their next use."""
        self._packed.clear()

    def _forward_of(self, layer: nn.Linear) -> Callable[[torch.Tensor], torch.Tensor]:
        product: Any = torch.ops.mkldnn._linear_pointwise.default  # noqa: SLF001 - what torch's own compiler calls
        width = layer.in_features

        def forward(given: torch.Tensor) -> torch.Tensor:
            weight, bias = layer.weight, layer.bias
            is_float = given.dtype is torch.float32
            num_tokens = given.numel() // width
            if given.dtype is not weight.dtype or num_tokens == 0 or (is_float and num_tokens == 1):
                return linear(given, weight, bias)
            if not self.packed_nbytes and not (is_float and num_tokens >= FEW_TOKENS):
                return linear(given, weight, bias)
            tokens = given.reshape(num_tokens, width)
            size = padded(num_tokens)
            if size > num_tokens:
                tokens = pad(tokens, (0, 0, 0, size - num_tokens))
            found: torch.Tensor = product(
                tokens, self._copy_of(weight) if self.packed_nbytes else weight, bias, "none", [], ""
            )
            return found[:num_tokens].view(*given.shape[:-1], -1)  # a tied head may state a stale size

        return forward

    def _copy_of(self, weight: torch.Tensor) -> torch.Tensor:
        found = self._packed.get(id(weight))
        if found is None or found.weight is not weight or found.version != weight._version:  # noqa: SLF001 - torch's count
            reorder: Any = torch.ops.mkldnn._reorder_linear_weight  # noqa: SLF001 - as above
            found = _Packed(weight, weight._version, reorder(weight.detach(), FEW_TOKENS))  # noqa: SLF001 - as above
            self._packed[id(weight)] = found
        return found.copy


def padded(num_tokens: int) -> int:
    """Return the number of tokens, of four an octave, to which a product is padded.

    >>> padded(7), padded(9), padded(100), padded(1025)
    (7, 10, 112, 1280)
    """
    step = 1 << max(0, (num_tokens - 1).bit_length() - 3)
    return -(-num_tokens // step) * step


def _has_onednn(device: torch.device) -> bool:
    is_x86 = platform.machine() in {"x86_64", "AMD64"}
    return device.type == "cpu" and is_x86 and torch.backends.mkldnn.is_available()


def _plain_layers(model: compat.Model) -> Iterator[nn.Linear]:
    has_bfloat16 = bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())  # noqa: SLF001 - as torch's own compiler asks
    known = {torch.float32, torch.bfloat16} if has_bfloat16 else {torch.float32}
    for module in model.modules():
        if type(module) is not nn.Linear or "forward" in vars(module):
            continue
        weight = module.weight
        is_known = type(weight) in {nn.Parameter, torch.Tensor} and weight.dtype in known
        if is_known and weight.numel() > 0 and not weight.is_inference():  # its changes are counted
            yield module
