"""From a config or a preset to bytes: golden values worked out by hand, every family, and every refusal."""

import json
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from pagedkv.errors import ConfigurationError
from pagedkv.models import ModelMemory, model_names, read_model
from tests.models.configs import LLAMA, PUBLISHED, PublishedConfig

GOLDEN_TOKEN_NBYTES = {
    "llama-3.1-8b": 2 * 32 * 8 * 128 * 2,
    "llama-3.1-405b": 2 * 126 * 8 * 128 * 2,
    "llama-2-7b": 2 * 32 * 4096 * 2,
    "opt-13b": 819_200,  # 800 KB: Kwon et al., PagedAttention, SOSP 2023, section 3
    "opt-66b": 2 * 64 * 9216 * 2,
    "deepseek-v3": 61 * (512 + 64) * 2,
    "qwen2.5-7b": 2 * 28 * 4 * 128 * 2,
    "mistral-7b-v0.1": 131_072,
    "gpt-oss-120b": 2 * 36 * 8 * 64 * 2,
}


def read(tmp_path: Path, config: object, kv_dtype: str | None = None) -> ModelMemory:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    return read_model(str(path), kv_dtype)


@pytest.mark.parametrize(("name", "token_nbytes"), GOLDEN_TOKEN_NBYTES.items())
def test_presets_meet_golden_bytes_a_token(name: str, token_nbytes: int) -> None:
    assert read_model(name).token_nbytes == token_nbytes


@pytest.mark.parametrize("published", PUBLISHED.values(), ids=PUBLISHED.keys())
def test_every_family_is_read_as_published(published: PublishedConfig, tmp_path: Path) -> None:
    model = read(tmp_path, published.config)
    assert {group.name: group.token_nbytes for group in model.groups} == published.token_nbytes
    assert model.state_nbytes == published.state_nbytes
    num_layers = {group.name: group.num_layers for group in model.groups}
    assert published.num_layers.items() <= num_layers.items()


@pytest.mark.parametrize("name", model_names())
def test_every_preset_is_whole(name: str) -> None:
    model = read_model(name)
    assert model.name == name
    assert model.num_parameters is not None
    assert model.num_active_parameters is not None
    assert model.weights_nbytes is not None
    assert model.num_active_parameters <= model.num_parameters <= model.weights_nbytes * 2
    assert model.max_context is not None
    assert model.max_context >= 2048
    assert len({group.name for group in model.groups}) == len(model.groups) > 0
    assert max(group.num_layers for group in model.groups) <= model.num_layers


def test_names_take_any_case_and_are_sorted() -> None:
    assert read_model("Llama-3.1-8B") == read_model("llama-3.1-8b")
    assert list(model_names()) == sorted(set(model_names()))


def test_a_folder_stands_for_the_config_in_it(tmp_path: Path) -> None:
    assert read(tmp_path, LLAMA).groups == read_model(str(tmp_path)).groups


@pytest.mark.parametrize(
    ("kv_dtype", "nbytes"),
    [(None, 2), ("auto", 2), ("fp8", 1), ("bf16", 2), ("fp16", 2), ("fp32", 4), ("float32", 4), ("bfloat16", 2)],
)
def test_the_kv_dtype_can_be_chosen(kv_dtype: str | None, nbytes: int) -> None:
    model = read_model("jamba-v0.1", kv_dtype)
    assert model.token_nbytes == 8192 * nbytes
    assert model.state_nbytes == 16_515_072
    assert model.dtype_nbytes == 2


def test_an_unknown_kv_dtype_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="one of auto, fp8, float32, float16, bfloat16, got 'int3'"):
        read_model("opt-13b", "int3")


@pytest.mark.parametrize(
    ("name", "suggested"),
    [
        ("llama-3.1-8", "llama-3.1-8b"),
        ("meta-llama/Llama-3.1-8B-Instruct", "llama-3.1-8b"),
        ("opt13b", "opt-13b"),
        ("./opt-13b", "opt-13b"),
        ("no/such/config.json", "preset"),
        ("x" * 10_000, "preset"),
        ("nul\0byte", "preset"),
    ],
)
def test_an_unknown_name_is_answered_with_the_nearest(name: str, suggested: str) -> None:
    with pytest.raises(ConfigurationError, match="`pagedkv presets` lists all") as caught:
        read_model(name or "./absent")
    assert suggested in str(caught.value)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("key", ["kv_cache_scheme", "kv_cache_quant_algo"])
def test_a_checkpoint_with_a_quantised_cache_needs_a_chosen_kv_dtype(key: str, tmp_path: Path) -> None:
    config = LLAMA | {"quantization_config": {"quant_method": "compressed-tensors", key: {"num_bits": 8}}}
    with pytest.raises(
        ConfigurationError, match=rf"quantization_config\.{key} selects .* Choose the KV cache's dtype: fp8"
    ):
        read(tmp_path, config)
    assert read(tmp_path, config, "fp8").token_nbytes == 65_536


HYBRID = PUBLISHED["qwen3_next"].config
LLAMA_4 = PUBLISHED["llama4"].config
DEEPSEEK = PUBLISHED["deepseek_v3"].config
GPT_OSS = PUBLISHED["gpt_oss"].config

REFUSED: dict[str, tuple[dict[str, object], str]] = {
    "no layers": (LLAMA | {"num_hidden_layers": None}, r"num_hidden_layers is missing\. Add the key"),
    "0 layers": (
        LLAMA | {"num_hidden_layers": 0},
        "num_hidden_layers is 0, but must be a whole number from 1 to 10000",
    ),
    "negative layers": (LLAMA | {"num_hidden_layers": -32}, "num_hidden_layers is -32, but must be"),
    "a billion layers": (LLAMA | {"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000, but must be"),
    "half a layer": (LLAMA | {"num_hidden_layers": 32.5}, r"num_hidden_layers is 32\.5, but must be"),
    "layers as text": (LLAMA | {"num_hidden_layers": "32"}, "num_hidden_layers is '32', but must be"),
    "layers as truth": (LLAMA | {"num_hidden_layers": True}, "num_hidden_layers is True, but must be"),
    "an integer of 400 digits": (LLAMA | {"hidden_size": 10**400}, r"hidden_size is 1000.*\.\.\..*0000, but must be"),
    "negative heads": (LLAMA | {"num_attention_heads": -1}, "num_attention_heads is -1"),
    "no heads": (LLAMA | {"num_attention_heads": None}, "num_attention_heads is missing"),
    "key heads that do not divide": (LLAMA | {"num_key_value_heads": 5}, "5, which does not divide the 32 query heads"),
    "more key heads than heads": (LLAMA | {"num_key_value_heads": 64}, "64, which does not divide the 32 query heads"),
    "no key heads where needed": (
        LLAMA | {"model_type": "mistral", "num_key_value_heads": None},
        "num_key_value_heads is missing",
    ),
    "heads that do not divide the width": (LLAMA | {"hidden_size": 4100}, "hidden_size is 4100, which the 32 heads"),
    "head_dim of 0": (LLAMA | {"head_dim": 0}, "head_dim is 0"),
    "no dtype": (LLAMA | {"torch_dtype": None}, r"dtype is missing \(nor torch_dtype\)"),
    "unknown dtype": (LLAMA | {"torch_dtype": "int4"}, "torch_dtype is 'int4', but must be one of float32"),
    "dtype as number": (LLAMA | {"torch_dtype": 16}, "torch_dtype is 16, but must be a text"),
    "no model_type": (LLAMA | {"model_type": None}, "model_type is missing"),
    "unknown model_type": (LLAMA | {"model_type": "zamba2"}, "model_type is 'zamba2', a kind of model not known"),
    "misspelt model_type": (LLAMA | {"model_type": "lama"}, r"Have its own class asked: pip install .*hf\]"),
    "another spelling": (LLAMA | {"model_type": "Qwen3-MoE"}, "It is written qwen3_moe"),
    "lightning attention": (
        LLAMA | {"model_type": "minimax_m2", "attn_type_list": [0, 1] * 16},
        "attn_type_list has layers of lightning attention",
    ),
    "encoder-decoder": (LLAMA | {"is_encoder_decoder": True}, "is_encoder_decoder is true"),
    "encoder-decoder around the part": (
        {"is_encoder_decoder": True, "text_config": LLAMA},
        "is_encoder_decoder is true",
    ),
    "flag as number": (LLAMA | {"is_encoder_decoder": 1}, "is_encoder_decoder is 1, but must be true or false"),
    "text_config as list": ({"text_config": [LLAMA]}, "text_config is .* but must be an object"),
    "missing in text_config": (
        {"text_config": LLAMA | {"num_hidden_layers": None}},
        r"text_config\.num_hidden_layers is missing",
    ),
    "a window on a model without": (LLAMA | {"sliding_window": 4096}, "sliding_window is set, which is not known of"),
    "latents on a model without": (LLAMA | {"kv_lora_rank": 512}, "kv_lora_rank is set"),
    "cross attention": (LLAMA | {"cross_attention_layers": [3, 8]}, "cross_attention_layers is set"),
    "an indexer": (DEEPSEEK | {"index_head_dim": 128}, "index_head_dim is set"),
    "shared layers on a model without": (LLAMA | {"num_kv_shared_layers": 4}, "num_kv_shared_layers is set"),
    "unknown layer type": (
        HYBRID | {"layer_types": ["full_attention"] * 47 + ["telepathy"]},
        r"layer_types\[47\] is 'telepathy', a type of layer not known",
    ),
    "too few layer types": (
        HYBRID | {"layer_types": ["full_attention"]},
        "layer_types lists 1 layers, but num_hidden_layers is 48",
    ),
    "layer types as text": (HYBRID | {"layer_types": "full"}, "layer_types is 'full', but must be a list of texts"),
    "layer types of numbers": (
        HYBRID | {"layer_types": [1] * 48},
        r"layer_types is \[1, .*, but must be a list of texts",
    ),
    "empty layer types": (
        {key: value for key, value in HYBRID.items() if key != "num_hidden_layers"} | {"layer_types": []},
        "num_hidden_layers is 0, but must|layer_types lists 0 layers",
    ),
    "linear attention on a model without": (
        LLAMA | {"layer_types": ["linear_attention"] * 32},
        "has linear attention, which is not known of the model_type 'llama'",
    ),
    "layers that must be listed": (GPT_OSS | {"layer_types": None}, "layer_types is missing, and this kind of model"),
    "a list without its window": (GPT_OSS | {"sliding_window": None}, "sliding_window is missing"),
    "window of 0": (GPT_OSS | {"sliding_window": 0}, "sliding_window is 0"),
    "chunked without a chunk": (LLAMA_4 | {"attention_chunk_size": None}, "attention_chunk_size is missing"),
    "rotary layers too few": (LLAMA_4 | {"no_rope_layers": [1, 0]}, "no_rope_layers lists 2 layers of 48"),
    "rotary layers negative": (LLAMA_4 | {"no_rope_layers": [-1] * 48}, "no_rope_layers is .* whole numbers"),
    "no linear heads": (HYBRID | {"linear_num_key_heads": None}, "linear_num_key_heads is missing"),
    "no rotary dimensions": (DEEPSEEK | {"qk_rope_head_dim": None}, "qk_rope_head_dim is missing"),
    "experts without a number used": (DEEPSEEK | {"num_experts_per_tok": None}, "num_experts_per_tok is missing"),
    "more experts used than there are": (DEEPSEEK | {"num_experts_per_tok": 257}, "num_experts_per_tok is 257"),
    "negative context": (LLAMA | {"max_position_embeddings": -1}, "max_position_embeddings is -1"),
}


@pytest.mark.parametrize(("config", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_what_is_not_understood_is_refused(config: dict[str, object], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=message) as caught:
        read(tmp_path, config)
    assert str(caught.value).startswith(f"{tmp_path / 'config.json'}: ")


@given(
    types=st.lists(
        st.sampled_from(["full_attention", "sliding_attention", "chunked_attention", "linear_attention"]),
        min_size=1,
        max_size=60,
    ),
    heads=st.tuples(st.integers(1, 16), st.integers(1, 8), st.sampled_from([32, 64, 80, 128, 256])),
    dtype=st.sampled_from([("float32", 4), ("bfloat16", 2)]),
)
def test_groups_hold_what_the_layers_hold_one_by_one(
    types: list[str],
    heads: tuple[int, int, int],
    dtype: tuple[str, int],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    num_kv_heads, num_queries_per_key, head_dim = heads
    config = HYBRID | {
        "num_hidden_layers": len(types),
        "layer_types": types,
        "num_key_value_heads": num_kv_heads,
        "num_attention_heads": num_kv_heads * num_queries_per_key,
        "head_dim": head_dim,
        "torch_dtype": dtype[0],
        "sliding_window": 100,
    }
    if "chunked_attention" in types:
        with pytest.raises(ConfigurationError, match="attention_chunk_size is missing"):
            read(tmp_path_factory.mktemp("model"), config)
        return
    model = read(tmp_path_factory.mktemp("model"), config)
    kinds = {"full_attention": "full", "sliding_attention": "window_100"}
    expected: dict[str, int] = {}
    for name in types:
        if name in kinds:
            expected[kinds[name]] = expected.get(kinds[name], 0) + 2 * num_kv_heads * head_dim * dtype[1]
    assert {group.name: group.token_nbytes for group in model.groups if group.kind != "recurrent"} == expected
    assert sum(group.num_layers for group in model.groups) == len(types)
    assert (model.state_nbytes > 0) == ("linear_attention" in types)


def test_a_kept_pair_of_query_and_key_costs_each_query_head_twice() -> None:
    (group,) = read_model("llama-3.1-8b").groups
    assert group.pair_flops == 32 * 32 * (2 * 128 + 2 * 128)
    (latent,) = read_model("deepseek-v3").groups
    assert latent.pair_flops == 61 * 128 * (2 * (128 + 64) + 2 * 128)
