"""What of transformers probe and engine touch, and where its versions differ. Nothing else imports it.

Versions 5.16 to 5.24 are meant. What they share is only given a name here; a difference between them has a function.

An attention function that a model calls by name finds the pass under way by itself: models do not pass every keyword
on, so the pass cannot be an argument of the call. It is kept in a context variable, so that engines in different
threads have different passes.

A :class:`BorrowedModel` calls the engine's attention for the time of a pass, and what it called before afterwards.
Which attention function a model calls is written in its configs, one word for every thread. Two engines in two threads
that each note the word, change it and restore it would restore each other's. So a pass holds a lock for each config
that it writes in, and the pass of another engine waits until it is over::

    engine 1   | sdpa -> pagedkv  ... pass ...  pagedkv -> sdpa |
    engine 2     waits                                           | sdpa -> pagedkv  ... pass ... |

Locks go by config, not by model, since two models may be made of one config. They cannot lie in a config, which is
copied and written to files; so they are listed here while an engine refers to them.
"""

import inspect
import re
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from importlib import import_module
from typing import Any, Final, Protocol, TypeAlias, cast, final
from weakref import WeakValueDictionary

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from pagedkv.contract.extras import to_install
from pagedkv.errors import EngineError, MissingExtraError, UnsupportedModelError

__all__ = [
    "IMPLEMENTATION",
    "PROBE",
    "AttentionListener",
    "BorrowedModel",
    "Cache",
    "Model",
    "State",
    "Zeros",
    "accepts",
    "adapted_layers",
    "attention_configs",
    "be_silent",
    "body",
    "byte_tokenizer",
    "call",
    "compressed_entries",
    "computing",
    "current_pass",
    "decoder_config",
    "dense_cache",
    "dense_generate",
    "dense_implementation",
    "empty_layer",
    "foreign_layers",
    "forward",
    "generate_padded",
    "has_adapters",
    "has_indexer",
    "is_linear",
    "language_weights",
    "listening",
    "load_adapter",
    "load_model",
    "load_state",
    "load_tokenizer",
    "make_llama",
    "make_without_weights",
    "place_indexers",
    "position_rules",
    "register",
    "rust_tokenizer",
    "state_tensors",
    "tensor_parallel_plan",
    "version",
    "windows_of",
]


try:
    import transformers
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import (
        CONFIG_MAPPING,
        MODEL_FOR_CAUSAL_LM_MAPPING,
        AttentionInterface,
        AutoModelForCausalLM,
        AutoModelForMultimodalLM,
        AutoTokenizer,
        GenerationConfig,
        LlamaConfig,
        LlamaForCausalLM,
        PreTrainedConfig,
        PreTrainedModel,
        PreTrainedTokenizerFast,
    )
    from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, LinearAttentionCacheLayerMixin
    from transformers.masking_utils import AttentionMaskInterface
except ImportError as problem:
    raise MissingExtraError(f"pagedkv.engine needs transformers 5.16 or newer: {to_install('hf')}") from problem
Model: TypeAlias = PreTrainedModel
State: TypeAlias = dict[str, torch.Tensor]
"""The tensors of one recurrent layer's state, by name, each ``[sequences, ...]``."""
OLDEST: Final = (5, 16)
CONVOLUTION, SCAN = "convolution", "scan"
STATE_NAME: Final = re.compile(rf"({CONVOLUTION}|{SCAN})_(\d+)")


def version() -> str:
    """Return the version of transformers."""
    return str(transformers.__version__)


def require_version() -> None:
    """Refuse a transformers that is too old. Raises MissingExtraError."""
    version = tuple(int(part) for part in transformers.__version__.split(".")[:2])
    if version < OLDEST:
        raise MissingExtraError(
            f"pagedkv.engine needs transformers 5.16 or newer, and {transformers.__version__} is installed: "
            f"{to_install('hf')}"
        )


# Attention


def register(name: str, attention: Callable[..., Any], mask: Callable[..., Any] | None = None) -> None:
    """Register an attention function for models; without a mask function they build no masks for it."""
    AttentionInterface.register(name, attention)
    if mask is not None:
        AttentionMaskInterface.register(name, mask)


def attention_configs(model: Model) -> tuple[PreTrainedConfig, ...]:
    """Return the configs that select the attention function of a model and of all models in it. O(modules)."""
    configs = {id(part.config): part.config for part in model.modules() if isinstance(part, PreTrainedModel)}
    for config in list(configs.values()):
        for key in config.sub_configs:
            part = getattr(config, key, None)
            if part is not None:
                configs[id(part)] = part
    return tuple(configs.values())


def dense_implementation(model: Model, *, has_cap: bool) -> str:
    """Return the name of a correct dense attention for a model: its own, unless that ignores soft caps.

    In 5.16 Gemma 2 selects ``sdpa`` by default, which ignores soft caps without an error.
    """
    return "eager" if has_cap else cast("str", model.config._attn_implementation)  # noqa: SLF001


# Forward passes


def accepts(model: Model, name: str) -> bool:
    """Return whether a model's forward takes an argument."""
    parameters = inspect.signature(model.forward).parameters
    return name in parameters or any(each.kind is each.VAR_KEYWORD for each in parameters.values())


def call(model: Model, cache: object, **inputs: Any) -> Any:  # noqa: ANN401 - the model's own
    """Run a model with a cache: the argument is ``cache`` since 5.24, where its forward names it so."""
    parameters = inspect.signature(model.forward).parameters
    return model(**inputs, **{"cache" if "cache" in parameters else "past_key_values": cache}, use_cache=True)


def forward(model: Model, wanted: torch.Tensor, cache: object, **inputs: Any) -> torch.Tensor:  # noqa: ANN401 - the model's own
    """Run a model, and return the logits of some of its tokens: ``[wanted, vocabulary]``, of its type.

    Args:
        model: the model.
        wanted: int64 ``[n]``: which tokens, of one row or of rows of one token each.
        cache: the cache that it is to read and update.
        inputs: the other arguments of its forward.

    The vocabulary is computed for these alone where the model can do so.
    """
    is_row = inputs["input_ids"].shape[0] == 1
    logits: torch.Tensor
    if is_row and "logits_to_keep" in inspect.signature(model.forward).parameters:
        logits = call(model, cache, **inputs, logits_to_keep=wanted).logits[0]
    else:
        logits = call(model, cache, **inputs).logits.flatten(0, 1)[wanted]
    return logits


def body(model: Model) -> torch.nn.Module:
    """Give the part of a model that answers hidden states, behind which its head begins."""
    if model.base_model is not model:
        return model.base_model
    parts = [part for part in model.children() if isinstance(part, PreTrainedModel)]  # Llama 4 names another prefix
    if len(parts) != 1:
        raise UnsupportedModelError(f"{type(model).__name__} has {len(parts)} bodies, where one was expected")
    return parts[0]


# Caches and states


def dense_cache(model: Model) -> Cache:
    """Make the cache that a model's own ``generate`` would use."""
    return DynamicCache(config=model.config)


def is_linear(layer: object) -> bool:
    """Return whether a layer of a cache keeps a recurrent state."""
    return isinstance(layer, LinearAttentionCacheLayerMixin)


def has_indexer(layer: object) -> bool:
    """Return whether a layer of a cache keeps keys of an indexer, for sparse attention."""
    return hasattr(layer, "update_indexer")


def place_indexers(cache: Cache, positions: torch.Tensor) -> None:
    """Tell a cache's indexers the positions of the keys that are read, ``[rows, keys]``, where a model asks for them.

    A model that rotates the keys of its indexers when they are read (Qwen4) keeps the positions of all tokens in its
    first such layer, three for each, and appends those of the pass.
    """
    first: Any = next((layer for layer in cache.layers if has_indexer(layer)), None)
    if first is not None and hasattr(first, "indexer_position_ids"):
        first.indexer_position_ids = positions.expand(3, -1, -1)


def compressed_entries(
    layer: Any,  # noqa: ANN401 - of transformers
) -> Iterator[tuple[str, int, int, torch.dtype, int, int]]:
    """Tell what a layer of a cache that compresses tokens keeps of them, after a pass; nothing of other layers.

    Yields, for each of its compressors: its name; tokens of an entry; elements of an entry, and their type; how many of
    the latest tokens' vectors are kept, and their elements. Where adjacent entries overlap, those of two entries are.
    """
    for name, entries in getattr(layer, "compressed_kv", {}).items():
        ratio, raw = layer.compress_rate, (layer.buffer_kv[name], layer.buffer_gate[name])
        num_raw = 2 * ratio if name in getattr(layer, "overlap_kv", {}) else ratio
        yield name, ratio, entries.shape[-1], entries.dtype, num_raw, sum(each.shape[-1] for each in raw)


def foreign_layers(cache: Cache) -> list[str]:
    """Return the class names of layers in a cache that are not transformers' own."""
    kinds = dict.fromkeys(type(layer) for layer in cache.layers)
    return [kind.__name__ for kind in kinds if kind.__module__ != CacheLayerMixin.__module__]


def empty_layer(like: Any) -> Any:  # noqa: ANN401 - of transformers
    """Make a recurrent layer of a cache anew, as one is; some have a window of keys, or several states of each kind."""
    given = {"sliding_window": like.sliding_window} if getattr(like, "sliding_window", None) is not None else {}
    if len(like.conv_states) > 1:
        given["number_of_states"] = len(like.conv_states)
    return type(like)(**given)


def windows_of(cache: Cache) -> set[int]:
    """Return the windows, in tokens, of the layers of a cache that do not keep all tokens."""
    layers: list[Any] = cache.layers
    return {layer.sliding_window for layer in layers if getattr(layer, "is_sliding", False)}


def state_tensors(layer: Any) -> State:  # noqa: ANN401 - of transformers
    """Name the tensors of a recurrent layer's state that are there."""
    found: State = {}
    for index, tensor in layer.conv_states.items():
        if tensor is not None:  # of a layer that records its past, the last inputs
            found[f"{CONVOLUTION}_{index}"] = tensor[..., -layer.conv_kernel_size[index] :]
    for index, tensor in layer.recurrent_states.items():
        if tensor is not None:
            found[f"{SCAN}_{index}"] = tensor
    return found


def load_state(layer: Any, state: Mapping[str, torch.Tensor], *, is_prompt: bool) -> None:  # noqa: ANN401
    """Let a new layer continue a state; its tensors are changed in place.

    Args:
        layer: a recurrent layer of a cache, of transformers.
        state: its tensors.
        is_prompt: what comes is a part of a prompt. One token alone is taken for a decoded one, for which some layers
            round otherwise (Nemotron-H bounds the time step of prompts alone), unless the layer records its past.
    """
    layer.record_past = is_prompt and bool(state)
    for name, tensor in state.items():
        match = STATE_NAME.fullmatch(name)
        assert match is not None, f"a state's tensor is called {name}"
        index = int(match[2])
        if match[1] == CONVOLUTION:
            layer.conv_states[index] = tensor
            layer.is_conv_states_initialized[index] = True
            layer.conv_kernel_size[index] = tensor.shape[-1]
        else:
            layer.recurrent_states[index] = tensor
            layer.is_recurrent_states_initialized[index] = True
        layer.has_previous_state[index] = True
        layer.device, layer.dtype = tensor.device, tensor.dtype


# Rotary positions


def position_rules(model: Model) -> set[str]:
    """List the rules by which a model's rotary factors come about: "default", "llama3", "dynamic", ..."""
    rules: set[str] = set()
    for module in model.modules():
        given = getattr(module, "rope_type", None)
        if isinstance(given, str):
            rules.add(given)
        elif isinstance(given, Mapping):
            rules.update(rule for rule in given.values() if isinstance(rule, str))
    return rules


def refuse_encoder(model: Model) -> None:
    """Refuse models that encode before they decode. Raises UnsupportedModelError."""
    if getattr(model.config, "is_encoder_decoder", False):
        raise UnsupportedModelError(
            f"{type(model).__name__} encodes before it decodes: cross-attention has no paged memory here. "
            "Use a model that only decodes"
        )


# Loading, and what a model answers by itself


def load_model(name: str, dtype: str, device: str) -> Model:
    """Load a decoder from a folder or by its name, to a device, in evaluation mode. Raises as transformers does."""
    transformers.utils.logging.disable_progress_bar()
    return cast("Model", AutoModelForCausalLM.from_pretrained(name, dtype=dtype).eval().to(device))


def has_adapters(model: Model) -> bool:
    """Return whether PEFT has loaded adapters into a model's layers. O(modules)."""
    return bool(adapted_layers(model))


def adapted_layers(model: Model) -> tuple[torch.nn.Module, ...]:
    """Return the layers that have adapters. O(modules)."""
    return tuple(module for module in model.modules() if hasattr(module, "_active_adapter"))


@contextmanager
def _without_advice() -> Iterator[None]:
    """Let transformers log errors alone."""
    before = transformers.utils.logging.get_verbosity()
    transformers.utils.logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers.utils.logging.set_verbosity(before)


def load_adapter(model: Model, folder: str, name: str) -> Any:  # noqa: ANN401 - transformers' report of keys
    """Load an adapter from a folder into a model's layers, under PEFT's name of it. Raises as transformers does."""
    import_module("peft")  # transformers raises a ValueError without it
    with warnings.catch_warnings(), _without_advice():  # for training; other adapters are told as missing
        warnings.simplefilter("ignore")
        report = model.load_adapter(folder, adapter_name=name)
    model.eval()
    return report


def load_tokenizer(name: str) -> Any:  # noqa: ANN401 - of any class
    """Load the tokenizer that lies beside a model. Raises as transformers does."""
    return AutoTokenizer.from_pretrained(name)


def rust_tokenizer(tokenizer: object) -> Tokenizer | None:
    """Return the tokenizer in Rust whose texts and tokens a tokenizer only passes on; None: it changes them.

    Asked directly it encodes in 0.2 of the time (``encode_batch_fast`` finds no offsets, and nothing is made of its
    answer but the ids), and decodes a token in a third. It pads and cuts where it was last told to.
    """
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        return None
    whole: Any = tokenizer
    for name in ("encode", "decode", "_encode_plus", "_decode"):
        if getattr(type(whole), name) is not getattr(PreTrainedTokenizerFast, name):
            return None
    rust: Tokenizer = whole.backend_tokenizer
    cleans_up_bpe = getattr(whole, "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output", True)
    cleans_up = whole.clean_up_tokenization_spaces and (cleans_up_bpe or not isinstance(rust.model, models.BPE))
    return None if cleans_up or whole.split_special_tokens else rust


SAMPLING_DEFAULTS: Final = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def sampling_defaults(name: str) -> dict[str, float]:
    """Return the sampling fields that a model's generation_config.json sets; none where there is no such file."""
    try:
        given = GenerationConfig.from_pretrained(name).to_diff_dict()
    except OSError:
        return {}
    return {each: given[each] for each in SAMPLING_DEFAULTS if given.get(each) is not None}


def be_silent() -> None:
    """Let transformers give no advice."""
    transformers.utils.logging.set_verbosity_error()


def tensor_parallel_plan(model: Model) -> dict[str, str]:
    """Return transformers' plan for tensor parallelism: styles by pattern of module names; {} where there is none."""
    config = model.config.get_text_config()
    return dict(getattr(config, "base_model_tp_plan", None) or {})


def dense_generate(model: Model, prompt_token_ids: Sequence[int], num_new: int) -> tuple[list[int], torch.Tensor]:
    """Run ``generate`` for the most likely ``num_new`` tokens, without end token: ids, logits ``[new, vocabulary]``."""
    greedy = GenerationConfig(
        max_new_tokens=num_new,
        do_sample=False,
        repetition_penalty=1.0,
        eos_token_id=-1,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    prompt = torch.tensor([list(prompt_token_ids)], device=model.device)
    with torch.inference_mode(), _without_advice():  # about the end token that no answer has
        out = cast("Any", model).generate(prompt, attention_mask=torch.ones_like(prompt), generation_config=greedy)
    return out.sequences[0, prompt.shape[1] :].tolist(), torch.cat(out.logits).float()


# What a model's config states


def longest_sequence(model: Model) -> int | None:
    """Return the number of positions of a model; None if its config has none."""
    config = model.config.get_text_config(decoder=True)
    for name in ("max_position_embeddings", "n_positions"):
        known = getattr(config, name, None)
        if known:
            return int(known)
    return None


def extents(model: Model) -> list[int]:
    """List the windows, chunks and budgets of indexers that a model's config names, whether or not they are used."""
    config = model.config.get_text_config(decoder=True)
    names = ("sliding_window", "attention_chunk_size", "index_topk", "indexer_budget")
    given = (getattr(config, name, None) for name in names)
    return [extent for extent in given if isinstance(extent, int)]


def vocabulary_size(model: Model) -> int:
    """Count the tokens that a model can be given; the probe counts those that it gives logits of."""
    return cast("torch.nn.Embedding", model.get_input_embeddings()).weight.shape[0]


def end_token_ids(model: Model) -> frozenset[int]:
    """List the tokens that end a sequence, as ``generate`` takes them."""
    given = getattr(model.generation_config, "eos_token_id", None)
    if given is None:
        return frozenset()
    return frozenset([given] if isinstance(given, int) else given)


# Models without weights


def decoder_config(values: Mapping[str, Any]) -> PreTrainedConfig:
    """Read a ``config.json``: that of the language model in it, where transformers has a decoder's class for that.

    A type that transformers does not name counts by the class that the file names (Kimi K2: DeepseekV3ForCausalLM).

    Raises:
        UnsupportedModelError: transformers has no class for it; code that lies beside a model is not run.
        And whatever transformers raises for a config that it cannot read.
    """
    model_type, named = str(values.get("model_type")), values.get("architectures") or [None]
    given = {key: value for key, value in values.items() if key not in {"auto_map", "quantization_config"}}
    if model_type in CONFIG_MAPPING:
        config = CONFIG_MAPPING[model_type].from_dict(given)
    else:
        kind = getattr(transformers, str(named[0]), None)
        if kind is None:
            raise UnsupportedModelError(
                f"transformers {version()} has no class for the model_type {model_type!r} ({named[0]}), and code that "
                "lies beside a model (trust_remote_code) is not run. Update transformers, or name another model"
            )
        config = kind.config_class.from_dict({key: given[key] for key in given if key != "model_type"})
    part = config.get_text_config(decoder=True)
    return part if type(part) in MODEL_FOR_CAUSAL_LM_MAPPING else config


def make_without_weights(config: PreTrainedConfig, dtype: str) -> Model:
    """Make a model on the meta device: its code and the shapes of its tensors, without their contents.

    Args:
        config: as from :func:`decoder_config`.
        dtype: the type of its weights, as ``torch`` names it.

    Raises whatever transformers raises for a config that no class takes. Cost: seconds for the largest models.
    """
    is_decoder = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
    with torch.device("meta"):
        model = (AutoModelForCausalLM if is_decoder else AutoModelForMultimodalLM).from_config(config, dtype=dtype)
        model.tie_weights()
    for each in attention_configs(model):
        each._experts_implementation_internal = "batched_mm"  # noqa: SLF001 - the one that looks at no contents
    return cast("Model", model.eval())


def language_weights(model: Model) -> dict[str, torch.nn.Parameter]:
    """Return the weights of a model's decoder and head by name, those that are tied once; not those that see images."""
    named = dict(model.named_parameters())
    if type(model.config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        return named
    ours = {id(each) for part in (model.get_decoder(), model.get_output_embeddings()) for each in part.parameters()}
    return {name: each for name, each in named.items() if id(each) in ours}


@final
class _Shapes(TorchDispatchMode):
    """Answers for tensors without contents what would need them: no element is other than zero."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401 - torch's
        has_no_contents = args and isinstance(args[0], torch.Tensor) and args[0].is_meta
        if has_no_contents and func is torch.ops.aten.nonzero.default:
            return args[0].new_empty((0, args[0].dim()), dtype=torch.int64)
        if has_no_contents and func in {torch.ops.aten.item.default, torch.ops.aten._local_scalar_dense.default}:  # noqa: SLF001
            return 0
        return func(*args, **(kwargs or {}))


@final
class Zeros(TorchDispatchMode):
    """Takes tensors without contents for zeros, so that functions which look something up in them can be asked."""

    def __init__(self) -> None:
        """Begin nothing yet: it is a context manager."""
        super().__init__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401 - torch's
        args, kwargs = tree_map_only(torch.Tensor, _with_contents, (args, kwargs or {}))
        return func(*args, **kwargs)


def _with_contents(tensor: torch.Tensor) -> torch.Tensor:
    return torch.zeros(tensor.shape, dtype=tensor.dtype, device="cpu") if tensor.is_meta else tensor


def computing(model: Model) -> AbstractContextManager[object]:
    """Give the context in which a model runs, be it one without weights."""
    return _Shapes() if model.device.type == "meta" else nullcontext()


# Making models, and asking them


def make_llama(config: Mapping[str, Any], weights: State | None = None) -> Model:
    """Make a model of Llama's architecture in float32, ready to answer.

    Args:
        config: its settings, as in a ``config.json``.
        weights: its tensors by name, float32; those that are tied may be left out. None: random ones.
    """
    model = LlamaForCausalLM(LlamaConfig.from_dict({**config, "dtype": "float32"}))
    if weights is not None:
        problems = model.load_state_dict(weights, strict=False)
        missing = set(problems.missing_keys) - set(model.all_tied_weights_keys)
        assert not missing, f"weights are missing: {sorted(missing)}"
        assert not problems.unexpected_keys, f"weights are unknown: {problems.unexpected_keys}"
    return cast("Model", model.eval())


def byte_tokenizer(special: Sequence[str], template: str) -> Any:  # noqa: ANN401 - of transformers
    """Make a tokenizer whose tokens are the 256 bytes, and special ones behind them: the first begins, the last ends.

    Args:
        special: further tokens.
        template: of conversations.
    """
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    return cast("Any", PreTrainedTokenizerFast)(
        tokenizer_object=tokenizer,
        bos_token=special[0],
        eos_token=special[-1],
        clean_up_tokenization_spaces=False,
        chat_template=template,
    )


@torch.no_grad()
def generate_padded(model: Model, prompts: Sequence[torch.Tensor], num_new: int) -> list[list[int]]:
    """Continue prompts with a model's own ``generate``, the shorter ones padded on the left.

    Args:
        model: the model.
        prompts: int64 ``[tokens]`` each.
        num_new: tokens to generate at most.
    """
    tokens = torch.nn.utils.rnn.pad_sequence(list(prompts), batch_first=True, padding_side="left")
    longest = tokens.shape[1]
    mask = torch.stack([torch.arange(longest) >= longest - len(prompt) for prompt in prompts]).long()
    answered = cast("Any", model).generate(tokens, attention_mask=mask, max_new_tokens=num_new, do_sample=False)
    return cast("list[list[int]]", answered[:, longest:].tolist())


IMPLEMENTATION: Final = "pagedkv"
PROBE: Final = "pagedkv_probe"


class AttentionListener(Protocol):
    """Computes the attention calls of a forward pass."""

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: object,
        options: dict[str, Any],
    ) -> torch.Tensor:
        """Compute one: query, key, value ``[batch, heads, tokens, dim]`` -> ``[batch, tokens, heads, value_dim]``."""

    def make_mask(self, options: dict[str, Any]) -> object:
        """Return the mask for a call of the mask function."""


_CURRENT: Final[ContextVar[AttentionListener | None]] = ContextVar("pagedkv pass", default=None)


@contextmanager
def listening(listener: AttentionListener) -> Iterator[None]:
    """Make a listener compute the calls of this context."""
    token = _CURRENT.set(listener)
    try:
        yield
    finally:
        _CURRENT.reset(token)


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: object = None,
    **options: Any,  # noqa: ANN401 - each model's own
) -> tuple[torch.Tensor, None]:
    return current_pass().attend(module, query, key, value, attention_mask, options), None


def _mask(**options: Any) -> object:  # noqa: ANN401 - as transformers calls it
    return current_pass().make_mask(options)


def current_pass() -> AttentionListener:
    """Return the pass that is under way in this context. Raises EngineError: there is none."""
    listener = _CURRENT.get()
    if listener is None:
        raise EngineError(
            f"the attention {IMPLEMENTATION!r} was called outside of an engine's step: either an engine computes with "
            "this model in another thread, then call it between steps, or a copy of it (copy.deepcopy); or it was "
            "given this implementation for good, then give it another one (model.set_attn_implementation)"
        )
    return listener


register(IMPLEMENTATION, _attention)  # no mask function: models make no masks, then
register(PROBE, _attention, _mask)


@final
class _ConfigLock:
    """The lock of one config. The config is kept alive, so that no other object gets its id."""

    def __init__(self, config: object) -> None:
        self.config = config
        self.lock = threading.RLock()  # reentrant: a pass inside a pass restores what it found


_LISTING: Final = threading.Lock()
_LOCKS: Final[WeakValueDictionary[int, _ConfigLock]] = WeakValueDictionary()


@final
class BorrowedModel:
    """A model that may belong to others too; O(modules) to make.

    Args:
        model: the model, whose configs stay the same ones.
        others: models that are borrowed together with it.
    """

    def __init__(self, model: Model, *others: Model) -> None:
        self._model = model
        found = [config for each in (model, *others) for config in attention_configs(each)]
        self._configs = tuple({id(config): config for config in found}.values())
        with _LISTING:
            locks = {id(config): _LOCKS.setdefault(id(config), _ConfigLock(config)) for config in self._configs}
        self._locks = [locks[key] for key in sorted(locks)]  # always taken in this order, which excludes deadlocks

    @contextmanager
    def calling(self, name: str) -> Iterator[None]:
        """Set the attention function that the model calls, within a context; waits for other threads' passes."""
        with self.alone():
            before = [(config, config._attn_implementation) for config in self._configs]  # noqa: SLF001 - transformers' name
            try:
                for config, _ in before:
                    config._attn_implementation_internal = name  # noqa: SLF001 - no walk over modules, no warnings
                yield
            finally:
                for config, was in before:
                    config._attn_implementation_internal = was  # noqa: SLF001

    @contextmanager
    def dense(self, *, has_cap: bool) -> Iterator[None]:
        """Let the model answer by itself for a while, with or without soft caps; waits as :meth:`calling` does."""
        with self.alone(), self.calling(dense_implementation(self._model, has_cap=has_cap)):
            yield

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Wait until no other thread borrows the model, and let none do so for a while."""
        with ExitStack() as stack:
            for each in self._locks:
                stack.enter_context(each.lock)
            yield
