"""A model seen from inside: the hidden states that its head reads, and those between its layers.

mlx-lm's models are a trunk (`model.model`: embedding, layers, norm) and a head with scales and soft
caps of its own. A `View` runs a module's own code with some of its attributes replaced, so that a
trunk can be listened to while the model stays as it is: nothing is patched, nothing written again.
"""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any, Callable, Sequence

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.utils import dequantize_model

from .errors import first_line
from .shapes import Float, Integer


class View:
    """A module whose code sees other attributes in place of some of its own; of a view, a view that
    has its replacements too."""

    def __init__(self, module: nn.Module | View, **replaced: Any):
        self.__dict__.update(vars(module) if isinstance(module, View) else {"_module": module}, **replaced)

    def __getattr__(self, name: str) -> Any:
        found = getattr(type(self._module), name, None)
        if isinstance(found, property):
            return found.fget(self)
        return found.__get__(self) if inspect.isfunction(found) else getattr(self._module, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return type(self._module).__call__(self, *args, **kwargs)

    def __contains__(self, name: str) -> bool:
        return name in self._module

    def __getitem__(self, name: str) -> Any:
        return self._module[name]


class Heard(View):
    """A view whose results `hear` sees, and may change, before its owner does."""

    def __init__(self, module: nn.Module, hear: Callable[[Any], Any], **replaced: Any):
        super().__init__(module, **replaced)
        self.__dict__["_hear"] = hear

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._hear(super().__call__(*args, **kwargs))


def trunk(model: nn.Module) -> nn.Module | None:
    """The part that makes the hidden states; None where a model does not set it apart."""
    name = _trunk_name(model)
    return getattr(model, name) if name else _below(model, trunk)


def _trunk_name(model: nn.Module) -> str | None:
    """Its own attribute: a property that looks into a language model is not what its code runs."""
    return next((name for name in ("model", "backbone") if name in model and _is_module(getattr(model, name))), None)


def _is_module(x: Any) -> bool:
    return isinstance(x, (nn.Module, View))


def _below(model: nn.Module, then: Callable) -> Any:
    language = getattr(model, "language_model", None)
    return then(language) if _is_module(language) else None


def _with_trunk(model: nn.Module, stand_in: Any, **more: Any) -> View:
    """more: attributes to replace beside the trunk."""
    name = _trunk_name(model)
    if name:
        return View(model, **{name: stand_in}, **more)
    return View(model, language_model=_below(model, lambda inner: _with_trunk(inner, stand_in, **more)))


class Inside:
    """A model that also tells its hidden states: the final ones, behind those after `depths` layers."""

    def __init__(self, model: nn.Module, depths: Sequence[int] = ()):
        self.model, self.depths = model, tuple(depths)

    def __call__(
        self, tokens: Integer[mx.array, "batch rows"], cache: Any = None
    ) -> tuple[Float[mx.array, "batch rows vocab"], list[Float[mx.array, "batch rows dim"]]]:
        """The model's own logits, and its states, shallow ones first."""
        states: list[mx.array] = []

        def hear(out: Any) -> Any:
            states.append(out[0] if isinstance(out, tuple) else out)
            return out

        inner = trunk(self.model)
        replaced = {}
        if self.depths:
            replaced["layers"] = [Heard(x, hear) if i in self.depths else x for i, x in enumerate(inner.layers, 1)]
        logits = _with_trunk(self.model, Heard(inner, hear, **replaced))(tokens, cache=cache)
        return logits, states

    def states(self, tokens: Integer[mx.array, "batch rows"], cache: Any = None) -> list[mx.array]:
        """The states alone: without an evaluation of the logits the head costs nothing."""
        return self(tokens, cache)[1]


def last_row(model: nn.Module) -> Callable:
    """The model as a function whose head runs on the last row only: a draft that reads several
    tokens needs no more."""
    view = _with_trunk(model, Heard(trunk(model), lambda states: states[:, -1:]))
    return lambda tokens, cache: view(tokens, cache=cache)


def embedding(model: nn.Module) -> tuple[str, nn.Module] | None:
    """The token embedding and its name in the trunk."""
    kinds = (nn.Embedding, nn.QuantizedEmbedding)
    found = [(name, m) for name, m in trunk(model).children().items() if isinstance(m, kinds)]
    return max(found, key=lambda x: x[1].weight.shape[0], default=None)


def output(model: nn.Module) -> nn.Module | None:
    """The output weights: a layer of their own, or the embedding."""
    owner = _head_owner(model)
    found = embedding(model)
    return owner.lm_head if owner is not None else found and found[1]


def _head_owner(model: nn.Module) -> nn.Module | None:
    while model is not None and not isinstance(getattr(model, "lm_head", None), (nn.Linear, nn.QuantizedLinear)):
        model = getattr(model, "language_model", None)
    return model


def share_ends(draft: nn.Module, target: nn.Module, dtype: mx.Dtype) -> None:
    """The target's embedding and head in place of the copies that a draft cut from it brought along,
    and its dtype for what is left; unpacked on a CPU, where quantised products are slow."""
    if mx.default_device().type == mx.cpu:
        dequantize_model(draft)
    draft.set_dtype(dtype)
    name, mine = embedding(draft)
    if mine.weight.shape[0] == embedding(target)[1].weight.shape[0]:
        setattr(trunk(draft), name, embedding(target)[1])
        if _head_owner(draft) is not None and _head_owner(target) is not None:
            _head_owner(draft).lm_head = _head_owner(target).lm_head


class Given(View):
    """A trunk that has run already."""

    def __init__(self, module: nn.Module, states: mx.array, **replaced: Any):
        super().__init__(module, _states=states, **replaced)

    def __call__(self, *args: Any, **kwargs: Any) -> mx.array:
        return self._states


def head(model: nn.Module, project: Callable[[mx.array], mx.array]) -> Callable:
    """The model's own head, with its scales and caps, as a function of (rows, dim) final states;
    `project` multiplies in place of its output weights."""
    name, _ = embedding(model)
    tied = SimpleNamespace(as_linear=project)

    def logits(states: Float[mx.array, "rows dim"]) -> Float[mx.array, "rows vocab"]:
        given = Given(trunk(model), states[None], **{name: tied})
        return _with_trunk(model, given, lm_head=project)(mx.zeros((1, states.shape[0]), mx.uint32))[0]

    return logits


def why_hidden(model: nn.Module, caches: Callable[[], list]) -> str | None:
    """Why the states can't be used, found by running the model once; None where they can."""
    if not isinstance(trunk(model), nn.Module):
        return "it does not set its hidden states apart from its head"
    tokens = mx.array([[0, 1]], dtype=mx.uint32)
    try:
        logits, states = Inside(model)(tokens, caches())
        last = last_row(model)(tokens, caches())
        if len(states) != 1 or states[0].shape[:2] != (1, 2) or last.shape != logits[:, -1:].shape:
            return "its hidden states do not come one a row"
        apart = mx.abs(last - logits[:, -1:]).max() / mx.maximum(mx.abs(logits).max(), 1e-6)
        return None if apart.item() < 0.05 else "its head gives other logits for single rows"
    except Exception as error:
        return f"its trunk can't be run apart from its head ({first_line(error)})"
