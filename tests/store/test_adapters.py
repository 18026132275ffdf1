"""Adapters whose two headers do not make one servable whole are refused, each by its own reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from epochless_vllm.errors import AdapterConfigError, AdapterNotFoundError, EpochlessError, InspectError
from epochless_vllm.protocol.digests import digest
from epochless_vllm.protocol.manifest import TensorEntry, manifest_from_parts
from epochless_vllm.store.adapters import (
    ModuleShape,
    check_base,
    check_coverage,
    config_of,
    inspect_adapter,
    inspect_parts,
)
from epochless_vllm.store.base_modules import read_base_modules
from tests.adapters import ALL_TARGETS, MINUTE, LlamaShape, make_adapter, make_tensors, module_name, tensor_names
from tests.tiny_model import make_model

Q0 = module_name("q_proj", 0)
A0, B0 = tensor_names(Q0)


def reason(directory: Path) -> str:
    with pytest.raises(InspectError) as caught:
        inspect_adapter(directory)
    return str(caught.value.fields["reason"])


def changed(tmp_path: Path, **tensors: np.ndarray | None) -> Path:
    """Write the usual adapter with tensors added, replaced or (None) dropped."""
    merged = {**make_tensors(shape=MINUTE, rank=2), **tensors}
    kept = {name: array for name, array in merged.items() if array is not None}
    return make_adapter(tmp_path / "adapter", rank=2, tensors=kept)


def test_adapter_on_all_projections_and_the_head_is_inspected_without_its_data(tmp_path: Path) -> None:
    targets = [*ALL_TARGETS, "lm_head"]
    directory = make_adapter(tmp_path, shape=MINUTE, rank=2, targets=targets, dtype="BF16")
    adapter = inspect_adapter(directory)
    assert len(adapter.modules) == 7 * MINUTE.layers + 1
    assert adapter.modules["lm_head"] == ModuleShape(2, MINUTE.hidden, MINUTE.vocab)
    size = (directory / "adapter_model.safetensors").stat().st_size
    assert adapter.data_begin + adapter.byte_length == size
    assert adapter.config.target_modules == tuple(sorted(adapter.modules))


@pytest.mark.parametrize(
    ("wanted", "name"),
    [
        ("unsupported_tensor", "base_model.model.model.embed_tokens.lora_embedding_A"),
        ("unsupported_tensor", "base_model.model.model.embed_tokens.lora_A.weight"),
        ("unsupported_tensor", "base_model.model.model.embed_tokens.base_layer.weight"),
        ("unsupported_tensor", "base_model.model.lm_head.base_layer.weight"),
        ("unsupported_tensor", "base_model.model.lm_head.modules_to_save.weight"),
        ("unsupported_tensor", "base_model.model.lm_head.weight"),
        ("unsupported_tensor", f"base_model.model.{Q0}.lora_magnitude_vector"),
        ("unsupported_tensor", f"base_model.model.{Q0}.lora_B.bias"),
        ("unsupported_tensor", f"base_model.model.{Q0}.lora_A.default.weight"),
        ("unsupported_tensor", f"base_model.model.{Q0}.lora_C.weight"),
        ("unsupported_tensor", f"base_model.model.{Q0}.lora_a.weight"),
        ("unsupported_tensor", f"base_model.model.{Q0}.lora_A.weight.weight"),
        ("unsupported_tensor", "base_model.model.model.layers.0.mlp.experts.3.up_proj.lora_A.weight"),
        ("unsupported_tensor", "base_model.model.model.layers.0..q_proj.lora_A.weight"),
        ("unsupported_tensor", "../../etc/passwd"),
        ("unsupported_tensor", ".lora_A.weight"),
        ("name", f"base_model.model.base_model.model.{Q0}.lora_A.weight"),
        ("lookalike_name", f"{Q0}.lora_A.weight"),
        ("lookalike_name", f"base_model.model.{Q0.replace('q_proj', 'Q_proj')}.lora_A.weight"),
        ("unpaired", "base_model.model.model.layers.7.self_attn.q_proj.lora_A.weight"),
    ],
)
def test_tensor_that_would_be_ignored_or_confused_is_refused(tmp_path: Path, wanted: str, name: str) -> None:
    assert reason(changed(tmp_path, **{name: np.ones((2, 8), dtype=np.float32)})) == wanted


def test_tensor_refusal_names_the_tensor(tmp_path: Path) -> None:
    name = f"base_model.model.{Q0}.lora_magnitude_vector"
    with pytest.raises(InspectError, match="DoRA") as caught:
        inspect_adapter(changed(tmp_path, **{name: np.ones(8, dtype=np.float32)}))
    assert caught.value.fields["tensor"] == name
    assert caught.value.status == 422


@pytest.mark.parametrize("dropped", [A0, B0])
def test_factor_without_its_partner_is_refused(tmp_path: Path, dropped: str) -> None:
    assert reason(changed(tmp_path, **{dropped: None})) == "unpaired"


@pytest.mark.parametrize(
    ("wanted", "shape"),
    [("rank", (3, 8)), ("shape", (16,)), ("shape", (2, 0)), ("shape", (0, 8)), ("shape", (2, 8, 1)), ("shape", ())],
)
def test_factor_of_the_wrong_shape_is_refused(tmp_path: Path, wanted: str, shape: tuple[int, ...]) -> None:
    assert reason(changed(tmp_path, **{A0: np.ones(shape, dtype=np.float32)})) == wanted


@pytest.mark.parametrize("dtype", ["F64"])
def test_dtype_that_is_not_served_is_refused_by_name(tmp_path: Path, dtype: str) -> None:
    directory = make_adapter(tmp_path, shape=MINUTE, dtypes={A0: dtype})
    assert reason(directory) == "dtype"
    with pytest.raises(InspectError, match="save it as F32, F16 or BF16"):
        inspect_adapter(directory)


@pytest.mark.parametrize("dtype", ["F8_E4M3", "I8"])
def test_quantised_dtype_is_refused_by_name(tmp_path: Path, dtype: str) -> None:
    directory = make_adapter(tmp_path, shape=MINUTE, rank=2, order=list(make_tensors(shape=MINUTE)))
    payload = (directory / "adapter_model.safetensors").read_bytes()
    # One byte per item: rewrite the first tensor's header as an eight-bit tensor of four times the width.
    old = b'{"dtype":"F32","shape":[2,8],"data_offsets":[0,64]}'
    new = b'{"dtype":"%s","shape":[2,32],"data_offsets":[0,64]}' % dtype.encode()
    assert payload.count(old) == 1
    length = int.from_bytes(payload[:8], "little") + len(new) - len(old)
    (directory / "adapter_model.safetensors").write_bytes(length.to_bytes(8, "little") + payload[8:].replace(old, new))
    assert reason(directory) == "dtype"


def test_adapter_without_tensors_is_refused(tmp_path: Path) -> None:
    assert reason(make_adapter(tmp_path, tensors={})) == "no_tensors"


def test_modules_are_sorted_whatever_the_order_of_the_data(tmp_path: Path) -> None:
    tensors = make_tensors(shape=MINUTE)
    adapter = inspect_adapter(make_adapter(tmp_path, tensors=dict(reversed(tensors.items()))))
    assert list(adapter.modules) == sorted(adapter.modules)
    assert len(adapter.modules) > 1


def test_an_inspected_adapter_does_not_change_with_the_document_it_was_made_from(tmp_path: Path) -> None:
    adapter = inspect_adapter(make_adapter(tmp_path, shape=MINUTE))
    document = dict(adapter.document)
    again = inspect_parts(document, list(adapter.tensors), adapter.data_begin)
    document["target_modules"] = []
    assert again.document == adapter.document


def test_names_without_pefts_prefix_are_read(tmp_path: Path) -> None:
    tensors = {name.removeprefix("base_model.model."): array for name, array in make_tensors(shape=MINUTE).items()}
    plain = inspect_adapter(make_adapter(tmp_path / "plain", tensors=tensors))
    assert plain.modules == inspect_adapter(make_adapter(tmp_path / "usual", shape=MINUTE)).modules


def test_configuration_of_another_adapter_is_refused(tmp_path: Path) -> None:
    directory = make_adapter(tmp_path / "a", shape=MINUTE, rank=2)
    other = make_adapter(tmp_path / "b", shape=MINUTE, rank=4)
    (directory / "adapter_config.json").write_bytes((other / "adapter_config.json").read_bytes())
    with pytest.raises(AdapterConfigError) as caught:
        inspect_adapter(directory)
    assert caught.value.fields["field"] == "r"


def test_configuration_that_is_not_an_object_of_json_is_refused(tmp_path: Path) -> None:
    directory = make_adapter(tmp_path, shape=MINUTE)
    (directory / "adapter_config.json").write_bytes(b"[]")
    assert reason(directory) == "not_object"
    (directory / "adapter_config.json").write_bytes(b" " * (2 << 20))
    assert reason(directory) == "too_large"


def base_of(shape: LlamaShape) -> dict[str, tuple[int, int] | None]:
    modules = {module_name(t, layer): shape.projection(t) for layer in range(shape.layers) for t in ALL_TARGETS}
    return {**modules, "lm_head": None}


def checked(tmp_path: Path, **options: Any) -> None:
    check_base(inspect_adapter(make_adapter(tmp_path, **{"shape": MINUTE, **options})), base_of(MINUTE))


def test_adapter_that_covers_what_it_targets_fits_its_base(tmp_path: Path) -> None:
    checked(tmp_path / "all")
    checked(tmp_path / "some", targets=["q_proj", "down_proj"])
    checked(tmp_path / "head", targets=[*ALL_TARGETS, "lm_head"])


def test_modules_the_base_does_not_have_are_named(tmp_path: Path) -> None:
    tensors = {
        n.replace("model.layers", "model.language_model.layers"): a for n, a in make_tensors(shape=MINUTE).items()
    }
    with pytest.raises(InspectError, match="no effect") as caught:
        checked(tmp_path, tensors=tensors)
    assert caught.value.fields["reason"] == "unmatched_module"
    assert caught.value.fields["modules"][0].startswith("model.language_model.layers.0.")


def test_factors_of_another_base_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InspectError) as caught:
        checked(tmp_path, shape=LlamaShape(16, 12, 2, 2, 1, 4, 16))
    assert caught.value.fields["reason"] == "base_shape"


def test_missing_layer_is_refused_unless_the_configuration_says_so(tmp_path: Path) -> None:
    with pytest.raises(AdapterConfigError, match="7 modules that have no tensors") as caught:
        checked(tmp_path / "silent", layers=[0])
    assert caught.value.fields["field"] == "target_modules"
    assert module_name("q_proj", 1) in caught.value.fields["modules"]
    checked(tmp_path / "said", layers=[0], config={"layers_to_transform": [0]})
    checked(tmp_path / "said", layers=[0], config={"target_modules": [module_name(t, 0) for t in ALL_TARGETS]})


def test_missing_layer_is_not_missed_where_modules_were_excluded(tmp_path: Path) -> None:
    checked(tmp_path, layers=[0], config={"exclude_modules": r".*\.1\..*"})


def test_missing_projection_within_the_stated_layers_is_refused(tmp_path: Path) -> None:
    tensors = make_tensors(shape=MINUTE, layers=[1])
    for name in tensor_names(module_name("up_proj", 1)):
        del tensors[name]
    with pytest.raises(AdapterConfigError):
        checked(tmp_path, tensors=tensors, config={"layers_to_transform": 1})


def test_adapter_that_names_modules_otherwise_than_the_checkpoint_is_left_to_the_ranks(tmp_path: Path) -> None:
    adapter = inspect_adapter(make_adapter(tmp_path, shape=MINUTE, layers=[0]))
    check_coverage(adapter, [f"language_model.{name}" for name in base_of(MINUTE)])
    check_coverage(adapter, ())
    with pytest.raises(AdapterConfigError):
        check_coverage(adapter, base_of(MINUTE))


def test_linear_modules_of_a_base_model_are_read_from_its_headers(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    modules = read_base_modules(model)
    shape = LlamaShape.from_config(json.loads((model / "config.json").read_text()))
    linear = {module_name(t, layer): shape.projection(t) for layer in range(shape.layers) for t in ALL_TARGETS}
    assert linear.items() <= modules.items()
    assert set(modules) - set(linear) <= {"lm_head", "model.embed_tokens"}
    check_base(inspect_adapter(make_adapter(tmp_path / "adapter", shape=shape)), modules)
    with pytest.raises(AdapterConfigError):
        check_coverage(inspect_adapter(make_adapter(tmp_path / "partial", shape=shape, layers=[0, 1, 3])), modules)
    (model / "broken.safetensors").write_bytes(bytes(20))
    with pytest.raises(InspectError):
        read_base_modules(model)
    assert read_base_modules(tmp_path) == {}


def manifest_entries(name_b: str = B0, rank_b: int = 2, dtype: str = "F32") -> list[TensorEntry]:
    sha256 = digest("test")
    size = 4 if dtype == "F32" else 8
    return [
        TensorEntry(A0, dtype, (2, 8), 16 * size, sha256),
        TensorEntry(name_b, dtype, (8, rank_b), 8 * rank_b * size, sha256),
    ]


CONFIG = {"alpha_pattern": {}, "lora_alpha": "8", "peft_type": "LORA", "use_rslora": False}


def test_configuration_is_read_back_from_a_manifest() -> None:
    assert config_of(manifest_from_parts(CONFIG, manifest_entries())).scaling_for(Q0) == 4.0


@pytest.mark.parametrize(
    ("config", "entries"),
    [
        ({}, manifest_entries()),
        ({**CONFIG, "lora_alpha": "8.0"}, manifest_entries()),
        (CONFIG, []),
        (CONFIG, manifest_entries()[:1]),
        (CONFIG, manifest_entries(name_b="x")),
        (CONFIG, manifest_entries(rank_b=3)),
        (CONFIG, manifest_entries(dtype="F64")),
    ],
)
def test_manifest_of_no_admissible_adapter_is_refused(config: dict[str, Any], entries: list[TensorEntry]) -> None:
    with pytest.raises((InspectError, AdapterConfigError)):
        config_of(manifest_from_parts(config, entries))


def test_damaged_adapter_directory_never_raises_anything_but_our_errors(tmp_path: Path) -> None:
    generator = np.random.default_rng(7)
    directory = make_adapter(tmp_path / "adapter", shape=LlamaShape(4, 4, 1, 1, 1, 4, 8), rank=1, targets=["q_proj"])
    originals = {name: (directory / name).read_bytes() for name in ("adapter_config.json", "adapter_model.safetensors")}
    refused = 0
    for _ in range(500):
        for name, original in originals.items():
            payload = bytearray(original)
            for _ in range(int(generator.integers(0, 4))):
                position = int(generator.integers(0, len(payload)))
                choice = generator.integers(0, 3)
                if choice == 0:
                    payload[position] = int(generator.integers(0, 256))
                elif choice == 1:
                    del payload[position:]
                    payload += b"}"
                else:
                    payload[position:position] = bytes(generator.choice([b"null", b"[", b'"', b"-1", b"1e9", b"{}"]))
            (directory / name).write_bytes(payload)
        try:
            inspect_adapter(directory)
        except EpochlessError:
            refused += 1
    assert 250 < refused < 500


def test_empty_directory_is_not_an_adapter(tmp_path: Path) -> None:
    with pytest.raises(AdapterNotFoundError, match=r"adapter_config\.json is not there"):
        inspect_adapter(tmp_path)
    (tmp_path / "adapter_config.json").write_text(json.dumps({}))
    with pytest.raises(AdapterNotFoundError, match=r"adapter_model\.safetensors is not there"):
        inspect_adapter(tmp_path)
