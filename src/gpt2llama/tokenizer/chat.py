"""Chats as ids, by the Jinja template of a file or by a built-in one."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from ..errors import InputError

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# Ours: a token names the role and one ends the message, where ChatML spells eight in all; a small
# model of a short context has none to spare.
ROLES = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
# llama-models, llama3/chat_format.py
LLAMA_3 = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}"
    "{{ message['content'] + '<|eot_id|>' }}"
    "{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
)
# llama (2), chat_completion() in llama/generation.py: each turn has its own BOS and EOS
LLAMA_2 = """\
{%- for message in messages %}{% for tag in ['[INST]', '[/INST]', '<<SYS>>', '<</SYS>>'] %}
{%- if tag in message.content %}{{ raise_exception('they hold ' + tag) }}{% endif %}
{%- endfor %}{% endfor %}
{%- set has_system = messages[0].role == 'system' %}
{%- for message in (messages[1:] if has_system else messages) %}
{%- set content = message.content %}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('after the system message, user and assistant must alternate') }}
{%- elif message.role == 'assistant' %}{{ ' ' + content.strip() + ' ' + eos_token }}
{%- else %}
{%- if loop.first and has_system %}
{%- set content = '<<SYS>>\\n' + messages[0].content + '\\n<</SYS>>\\n\\n' + content %}
{%- endif %}
{{- bos_token + '[INST] ' + content.strip() + ' [/INST]' }}
{%- endif %}
{%- endfor %}"""
BUILT_IN = {"chatml": CHATML, "llama-3": LLAMA_3, "llama-2": LLAMA_2}


def built_in_template(special_ids: Iterable[str]) -> str | None:
    """The format that a vocabulary has the special tokens of; Llama 2's has none that tell it."""
    if "<|im_start|>" in special_ids:
        return CHATML
    return LLAMA_3 if "<|start_header_id|>" in special_ids else None


def template_of(config: Mapping[str, Any], special_ids: Iterable[str]) -> str | None:
    """The config's own, or the built-in one whose special tokens the vocabulary has."""
    template = config.get("chat_template")
    if isinstance(template, list):  # several by name, as transformers once wrote them
        named = {t.get("name"): t.get("template") for t in template if isinstance(t, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else built_in_template(special_ids)


def chat_ids(
    template: str,
    messages: Sequence[Mapping[str, str]],
    encode: Callable[[str], list[int]],
    special_ids: Mapping[str, int],
    *,
    bos: str | None,
    eos: str | None,
    encode_later: Callable[[str], list[int]] | None = None,
    lstrip: Collection[str] = (),
    rstrip: Collection[str] = (),
    generation_prompt: bool = True,
) -> list[int]:
    """The ids of `{"role", "content"}` messages and, unless generation_prompt is off, of the
    beginning of the assistant's next.

    special_ids: the id of each special token. Where the template writes one it becomes that id;
    where a message has one in its text, it stays text. encode: of the text between two of them;
    encode_later: of one that is not the chat's beginning, where that differs (a SentencePiece
    dummy prefix that only the first text gets). lstrip, rstrip: the special tokens that take the
    white space before or after them away.
    Raises InputError for messages that are none, TokenizerError as `sandbox.render` does.
    """
    from .sandbox import MAX_TEXT, render  # here, since Jinja takes 40 ms to load

    messages = _checked(messages)
    contents = [message["content"] for message in messages]
    if sum(map(len, contents)) > MAX_TEXT:
        raise InputError(f"the messages have more than {MAX_TEXT:,} characters; shorten them")
    names = sorted(filter(None, special_ids), key=len, reverse=True)  # of two, the longer counts
    special = "|".join(map(re.escape, names)) or "(?!)"
    # While the template runs, a private character stands where a special token begins in a text.
    begins = re.compile(f"(?=(?:{special}))[\\s\\S]")
    firsts = sorted({match[0] for text in contents for match in begins.finditer(text)})
    taken = set("".join([template, *special_ids, *contents]))
    private = (chr(c) for c in range(0xE000, sys.maxunicode + 1) if chr(c) not in taken)
    stand_in = dict(zip(firsts, private, strict=False))
    for message in messages:
        message["content"] = begins.sub(lambda match: stand_in[match[0]], message["content"])
    restore = str.maketrans({private: first for first, private in stand_in.items()})

    ids, text = (
        list[int](),
        render(template, messages, bos=bos, eos=eos, add_generation_prompt=generation_prompt),
    )
    parts = re.split(f"({special})", text)
    for i, part in enumerate(parts):
        if i % 2:
            ids.append(special_ids[part])
            continue
        if parts[i - 1 : i] and parts[i - 1] in rstrip:
            part = part.lstrip()
        if parts[i + 1 : i + 2] and parts[i + 1] in lstrip:
            part = part.rstrip()
        if part:
            ids += (encode_later if encode_later and i else encode)(part.translate(restore))
    return ids


def _checked(messages: Sequence[Mapping[str, str]]) -> list[dict[str, str]]:
    if not messages:
        raise InputError("a chat needs at least one message")
    for i, message in enumerate(messages):
        if unknown := message.keys() - {"role", "content"}:
            raise InputError(f"message {i} has a {min(unknown)!r}; only role and content are read")
        role, content = message.get("role"), message.get("content")
        if role not in ("system", "user", "assistant"):
            raise InputError(f"message {i} has role {role!r}; use system, user or assistant")
        if not isinstance(content, str):
            raise InputError(f"message {i} must have a string content (got {content!r})")
    return [dict(message) for message in messages]
