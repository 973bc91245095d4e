"""Which page store holds a layer's pages: filled by the connector when vLLM hands over the KV cache, read by attention.

Keyed by the arena's address, because that is all that vLLM passes to an attention layer (its view of the arena), and two engines may
live in one process.
"""

import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from zipfusion_vllm.attention.page_store import PageStore


class _Entry(NamedTuple):
    store: "PageStore"
    layer_index: dict[str, int]
    owner: Any
    """Weak reference to the connector that registered it: a dead owner's address may be another's now."""


_stores: dict[int, _Entry] = {}


def register_store(kv_cache: torch.Tensor, store: "PageStore", layer_names: list[str], owner: object) -> None:
    """Make ``store`` the home of the layers that share the storage of ``kv_cache``, for as long as ``owner`` lives."""
    for address in [address for address, entry in _stores.items() if entry.owner() is None]:
        del _stores[address]
    index = {name: i for i, name in enumerate(layer_names)}
    _stores[kv_cache.untyped_storage().data_ptr()] = _Entry(store, index, weakref.ref(owner))


def store_of(kv_cache: torch.Tensor, layer: Any) -> tuple["PageStore", int]:
    """The store and the index in it of ``layer``. Raises RuntimeError if the connector has not registered the arena."""
    entry = _stores.get(kv_cache.untyped_storage().data_ptr())
    if entry is None:
        raise RuntimeError(
            "ZIPFUSION attention runs without its connector: it was filtered out (VLLM_PLUGINS) or replaced "
            "(--kv-transfer-config) in this worker; start vLLM with ZIPFUSION through VLLM_ATTENTION_BACKEND or --attention-backend."
        )
    return entry.store, entry.layer_index[layer.layer_name]
