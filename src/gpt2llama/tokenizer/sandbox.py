"""A chat template comes from outside: Jinja in a sandbox, with bounds.

It reaches nothing but the messages (Jinja's immutable sandbox), and whatever it makes or walks
through is counted, so that neither its time nor its memory grows beyond what a chat needs.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import lru_cache, wraps
from types import CodeType
from typing import Any

from jinja2 import Template, TemplateError, Undefined, nodes, pass_context
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import FILTERS
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment, safe_range
from jinja2.tests import TESTS
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from ..errors import TokenizerError

MAX_TEMPLATE = 1 << 15  # characters; the longest of a known model has some 17,000
MAX_TEXT = 1 << 20  # characters of a rendered chat: more than 128k tokens
MAX_SECONDS = 2.0  # of the processor: a busy machine makes no template slow
# What a template may make, one value and all together: a character counts 1, an item _ITEM.
_MAX_VALUE, _MAX_MADE, _ITEM = 4 << 20, 64 << 20, 16

# What templates of known models use, and nothing that can pad, repeat or run long.
_FILTERS = (
    "abs capitalize count d default dictsort first float int items last length list lower map "
    "reject rejectattr reverse select selectattr sort title trim unique upper"
)
_METHODS = (  # of texts, lists and dicts
    "capitalize count endswith find get index isalpha isdigit islower isnumeric isspace isupper "
    "items join keys lower lstrip partition removeprefix removesuffix replace rfind rpartition "
    "rsplit rstrip split splitlines startswith strip title upper values"
)


def render(
    template: str,
    messages: Sequence[Mapping[str, str]],
    *,
    bos: str | None,
    eos: str | None,
    add_generation_prompt: bool = True,
) -> str:
    """The template's text, as transformers' apply_chat_template(tokenize=False) has it.

    Raises TokenizerError for one that is broken, too large, too slow, or refuses the messages.
    """
    if len(template) > MAX_TEMPLATE:
        raise TokenizerError(f"the chat template has more than {MAX_TEMPLATE:,} characters")
    named = {"bos_token": bos, "eos_token": eos}
    values: dict[str, Any] = {name: token for name, token in named.items() if token is not None}
    values |= {"messages": messages, "tools": None, "documents": None}
    try:
        code = _compile(template)
        sandbox = _Sandbox()
        loaded = Template.from_code(sandbox, code, sandbox.globals)
        text = loaded.render(values, add_generation_prompt=add_generation_prompt)
    except _Refusal as error:
        raise TokenizerError(f"the chat template refuses these messages: {error}") from None
    except Exception as error:
        why = " ".join(str(error).split())[:300] or type(error).__name__
        raise TokenizerError(f"the chat template cannot be used: {why}") from None
    if len(text) > MAX_TEXT:
        raise TokenizerError(f"the chat template wrote more than {MAX_TEXT:,} characters")
    return text


@lru_cache(maxsize=8)
def _compile(template: str) -> CodeType:
    sandbox = _Sandbox()
    return sandbox.compile(_Counted().visit(sandbox.parse(template)))


class _Refusal(TemplateError):
    """The template's own words, by raise_exception()."""


class _Counted(NodeTransformer):
    """What compiled templates do without asking the environment becomes a filter of its own."""

    def _made(self, node: Any) -> nodes.Filter:
        return _filter(self.generic_visit(node), "made")

    visit_List = visit_Dict = _made

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        return self._made(node) if node.ctx == "load" else node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        return self._made(node) if isinstance(node.arg, nodes.Slice) else self.generic_visit(node)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _filter(nodes.List(node.nodes, lineno=node.lineno), "join")

    def visit_Operand(self, node: nodes.Operand) -> nodes.Node:  # of a comparison
        node.expr = _filter(self.visit(node.expr), "made")
        return node

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = _filter(node.iter, "each")
        return node


def _filter(node: Any, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


class _Generation(Extension):
    """`{% generation %}`, which marks the assistant's words for training; here they are words."""

    tags = {"generation"}  # noqa: RUF012  # as Jinja declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _Sandbox(ImmutableSandboxedEnvironment):
    """For one rendering, whose work it counts."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, loopcontrols],
            optimized=False,  # and with a finalize that takes the context: nothing runs early
            finalize=pass_context(lambda context, value: self.text(value)),
        )
        self._left, self._end = _MAX_MADE, time.thread_time() + MAX_SECONDS
        self.filters = {name: self._counted(FILTERS[name]) for name in _FILTERS.split()}
        self.filters |= {"join": self.join, "replace": self.replace, "string": self.text}
        self.filters |= {"safe": self.text}  # nothing is escaped
        self.filters |= {"tojson": self.tojson, "made": self.made, "each": self.each}
        self.tests = {name: self._counted(test) for name, test in TESTS.items()}  # type: ignore  # wraps each
        self.globals = {
            "dict": lambda *args, **kwargs: dict(*args, **kwargs),
            "namespace": Namespace,
            "raise_exception": self._refuse,
            "range": safe_range,
            "strftime_now": lambda format: datetime.now().strftime(format[:64]),
        }

    def _count(self, size: int) -> None:
        self._left -= size
        if self._left < 0 or size > _MAX_VALUE:
            raise SecurityError("it makes more than a chat needs")
        if time.thread_time() > self._end:
            raise SecurityError(f"it runs for more than {MAX_SECONDS:g} s")

    def _counted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)  # with what it asks Jinja to pass
        def counted(*args: Any, **kwargs: Any) -> Any:
            return self.made(function(*args, **kwargs))

        return counted

    def made(self, value: Any) -> Any:
        """Every text and container that a template makes passes here."""
        if isinstance(value, list | tuple | dict):
            self._count(_ITEM * len(value))
            _check_size(value)
        else:
            self._count(len(value) if isinstance(value, str) else 0)
        return self.each(value) if isinstance(value, Iterator) else value

    def each(self, values: Iterable[Any]) -> Iterator[Any]:
        for value in values:
            self._count(_ITEM)
            yield value

    def text(self, value: Any) -> str:
        """What `{{ value }}` writes."""
        if not isinstance(value, str | list | tuple | dict | int | float | None | Undefined):
            raise SecurityError(f"it writes a {type(value).__name__}, which is no text")
        return str(self.made(value))

    def concat(self, parts: Iterable[str]) -> str:
        """Jinja's "".join of what a macro, a block or the template wrote."""
        kept, size = [], 0
        for part in parts:
            size += len(part)
            if size > _MAX_VALUE:
                break
            kept.append(part)
        self._count(size)
        return "".join(kept)

    def join(self, values: Iterable[Any], d: str = "", attribute: str | None = None) -> str:
        if attribute is not None:
            values = (self.getitem(value, attribute) for value in values)
        texts = (part for value in values for part in (d, self.text(value)))
        return self.concat(texts)[len(d) :]

    def replace(self, s: Any, old: str, new: str, count: int | None = None) -> str:
        text, times = self.text(s), -1 if count is None else count
        self._count(len(text) + text.count(old) * len(new))
        return text.replace(old, new, times)

    def tojson(
        self,
        x: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        if indent not in (None, *range(17)) or len("".join(separators or ())) > 16:
            raise SecurityError("it writes JSON with too much space")
        encoder = json.JSONEncoder(
            ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
        )
        return self.concat(encoder.iterencode(self.made(x)))

    def _refuse(self, message: object) -> None:
        raise _Refusal(" ".join(self.text(message).split())[:300])

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator != "+":
            small = all(isinstance(x, int | float) and abs(x) < 2**63 for x in (left, right))
            if operator == "**" or not small:
                raise SecurityError(f"it uses {operator} for more than small numbers")
        return self.made(super().call_binop(context, operator, left, right))

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        self._count(_ITEM)
        owner, name = getattr(obj, "__self__", None), getattr(obj, "__name__", "")
        if isinstance(owner, str) and name == "join":
            return self.join(args[0], owner)
        if isinstance(owner, str) and name == "replace":
            return self.replace(owner, *args)
        return self.made(super().call(context, obj, *args, **kwargs))

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if isinstance(obj, str | list | tuple | dict | int | float):
            return attr in _METHODS.split()
        return super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> None:
        """str.format can pad without end: it is no safe attribute."""


def _check_size(value: object) -> None:
    """Of a container with all that it holds, as often as it holds it."""
    left, stack = _MAX_VALUE, [value]
    while stack:
        value = stack.pop()
        left -= _ITEM + (len(value) if isinstance(value, str) else 0)
        if left < 0:
            raise SecurityError("it makes more than a chat needs")
        if isinstance(value, dict):
            stack += [*value, *value.values()]
        elif isinstance(value, list | tuple):
            stack += value
