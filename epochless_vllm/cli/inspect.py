"""Show what an adapter directory holds: modules, ranks, scalings and the revision it would be published as. Every byte
is read and checked as a server would, and nothing is written."""

from __future__ import annotations

import argparse
import io
import os
from typing import Any

from epochless_vllm.cli.output import Output, size
from epochless_vllm.protocol.manifest import Manifest, manifest_from_parts
from epochless_vllm.store.adapters import InspectedAdapter, inspect_source
from epochless_vllm.store.blobs import copy_tensors
from epochless_vllm.store.sources import open_adapter_directory


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the verb's options."""
    parser.add_argument("path", help="directory with adapter_config.json and adapter_model.safetensors")
    parser.add_argument("--modules", action="store_true", help="list every module")


def run(arguments: argparse.Namespace, output: Output) -> int:
    """Print what the adapter is."""
    adapter, manifest = read_adapter(arguments.path)
    described = describe_adapter(adapter, manifest)
    output.value(described)
    output.line(f"revision  {described['revision_id']}")
    output.line(f"tensors   {len(adapter.tensors)} {'/'.join(described['dtypes'])}, {size(adapter.byte_length)}")
    output.line(f"modules   {len(adapter.modules)}, rank {_range(m['rank'] for m in described['modules'])}")
    output.line(f"scaling   {_range(m['scaling'] for m in described['modules'])}")
    if arguments.modules:
        rows = [(m["name"], m["rank"], m["scaling"], m["inputs"], m["outputs"]) for m in described["modules"]]
        output.line()
        output.table(("module", "rank", "scaling", "inputs", "outputs"), rows)
    return 0


def read_adapter(path: str) -> tuple[InspectedAdapter, Manifest]:
    """Return an adapter and its manifest, after reading every byte.

    Raises:
        AdapterNotFoundError, PathRefusedError, RefusedAdapterError: a server would refuse it for the same reason.
    """
    with open_adapter_directory(path) as source:
        adapter = inspect_source(source)
        with io.FileIO(os.devnull, "wb") as nowhere:
            entries = copy_tensors(source.tensors.file.readinto, adapter.tensors, nowhere)
        source.config.check_unchanged()
        source.tensors.check_unchanged()
    return adapter, manifest_from_parts(adapter.config.manifest_config(), entries)


def describe_adapter(adapter: InspectedAdapter, manifest: Manifest) -> dict[str, Any]:
    """Return the adapter as JSON types; modules in name order."""
    return {
        "revision_id": manifest.revision_id,
        "byte_length": adapter.byte_length,
        "dtypes": sorted({record.dtype for record in adapter.tensors}),
        "config": dict(manifest.config),
        "modules": [
            {
                "name": name,
                "rank": shape.rank,
                "scaling": adapter.config.scaling_for(name),
                "inputs": shape.inputs,
                "outputs": shape.outputs,
            }
            for name, shape in sorted(adapter.modules.items())
        ],
    }


def _range(values: Any) -> str:
    low, *_, high = sorted(values) * 2
    return f"{low:g}" if low == high else f"{low:g} to {high:g}"
