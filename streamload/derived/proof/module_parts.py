"""Parts of a built module: weights, attributes, and the classes of the modules in it."""

from __future__ import annotations

import io
import re
import zipfile
from collections.abc import Callable
from typing import Any

import torch
from xxhash import xxh3_128

from streamload.errors import FeatureNotCacheable

STRUCTURE = frozenset(vars(torch.nn.Module())) | {"_compiled_call_impl"}
"""Names in the `__dict__` of every module: parameters, buffers, children, hooks, `training`."""
_WRAPPERS = ("OptimizedModule", "DataParallel", "DistributedDataParallel")
"""Of `torch.compile` and of training on several devices: what they hold themselves computes nothing."""
_MANGLED = re.compile(rb"[./]___torch_mangle_\d+")
"""Suffix that TorchScript puts into the name of a class each time that it compiles one."""
_NOT_COMPUTED_WITH = re.compile(r"\.debug_pkl$|/traced_inputs|/\.data/serialization_id$")


def tensor_digest(tensor: torch.Tensor) -> str:
    """128 bits over dtype, shape and bytes; of a CPU tensor at about 9 GB/s.

    Raises:
        FeatureNotCacheable: it has no bytes of its own (meta, sharded, sparse).
    """
    plain = tensor.detach()
    if plain.layout is not torch.strided or plain.device.type == "meta":
        raise FeatureNotCacheable(f"a {plain.device.type} tensor of layout {plain.layout} can't be digested")
    digest = xxh3_128(f"{plain.dtype}{list(plain.shape)}".encode())
    if plain.is_quantized:
        digest.update(_quantization(plain).encode())
        plain = plain.int_repr()
    if plain.numel():
        digest.update(plain.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def module_parts(
    module: torch.nn.Module, describe: Callable[[Any, str], Any], where: str
) -> tuple[str, Any, Any]:
    """Parts of a built module, described by `Describer.value`; `where` is its name, for errors.

    Returns:
        a digest of weights; by module, its other attributes; by module, its class and its hooks.
    """
    digest = xxh3_128()
    attributes: dict[str, Any] = {}
    classes: dict[str, Any] = {}
    for prefix, child in module.named_modules():
        for name, tensor in (*child._parameters.items(), *child._buffers.items()):
            if tensor is not None:
                digest.update(f"{prefix}.{name} {tensor_digest(tensor)}".encode())
        place = f"{where}.{prefix}" if prefix else where
        described = {
            name: describe(value, f"{place}.{name}") for name, value in sorted(attributes_of(child).items())
        }
        if described:
            attributes[prefix] = described
        hooks = [
            describe(hook, f"a forward hook of {place}")
            for hook in (*child._forward_pre_hooks.values(), *child._forward_hooks.values())
        ]
        classes[prefix] = [describe(type(child), place), *hooks]
    return digest.hexdigest(), attributes, classes


def attributes_of(module: torch.nn.Module) -> dict[str, Any]:
    """Attributes of a module beside parameters, buffers, children, hooks; of TorchScript a digest of all."""
    if isinstance(module, torch.jit.ScriptModule):
        return {"script": script_digest(module)}
    if type(module).__name__ in _WRAPPERS:  # around the module itself
        return {}
    return {
        name: value
        for name, value in vars(module).items()
        if name not in STRUCTURE and not name.startswith("_streamload_")
    }


def script_digest(module: torch.jit.ScriptModule) -> str:
    """128 bits over code, constants, attributes and weights, as they are saved."""
    digest = xxh3_128()
    with zipfile.ZipFile(io.BytesIO(module.save_to_buffer())) as archive:
        for name in sorted(archive.namelist()):
            if not _NOT_COMPUTED_WITH.search(name):
                digest.update(_MANGLED.sub(b"", name.encode() + archive.read(name)))
    return digest.hexdigest()


def _quantization(tensor: torch.Tensor) -> str:
    if tensor.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
        return f"{tensor.qscheme()} {tensor.q_scale()!r} {tensor.q_zero_point()}"
    scales, zeros = tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points()
    return f"{tensor.qscheme()} {scales.tolist()} {zeros.tolist()} {tensor.q_per_channel_axis()}"
