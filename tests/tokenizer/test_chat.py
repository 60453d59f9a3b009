"""Chat templates: rendered text and ids are transformers'; what a template may do is bounded."""

from __future__ import annotations

import itertools
import tracemalloc
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from gpt2llama.errors import InputError, TokenizerError
from gpt2llama.tokenizer import BPETokenizer, sandbox
from gpt2llama.tokenizer.chat import (
    CHATML,
    LLAMA_2,
    LLAMA_3,
    ROLES,
    built_in_template,
    chat_ids,
)
from gpt2llama.tokenizer.sandbox import render

Chat = list[dict[str, str]]
BOS, EOS = "<s>", "</s>"
SPECIALS = [BOS, EOS, "<|im_start|>", "<|im_end|>", "<|eot|>", "<|head|>", "<|/head|>", "<|eot|><"]
SPECIALS += ["<|system|>", "<|user|>", "<|assistant|>", "<|end|>"]

# In the manner of the templates of real models; each uses what the others do not.
TEMPLATES = {
    "chatml": CHATML,
    "ours": ROLES,
    "default system message": """\
{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}\
{{ '<|im_start|>system\nYou are Tiny, a helpful model.<|im_end|>\n' }}{% endif %}\
{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}\
{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}""",
    "trimmed, with a date and tools": """\
{{- bos_token }}
{%- if not tools_first is defined %}
    {%- set tools_first = true %}
{%- endif %}
{%- if strftime_now is defined %}{%- set today = strftime_now("%d %b %Y") %}{%- endif %}
{#- The system message is taken out. #}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|head|>system<|/head|>\n\n" }}
{%- if tools is not none and tools_first %}
    {%- for t in tools %}{{ t | tojson(indent=4) }}{{ "\n\n" }}{% endfor %}
{%- endif %}
{{- "Today: " + today + "\n" }}
{{- system_message + "<|eot|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|head|>' + message['role'] + '<|/head|>\n\n' }}
        {{- message['content'] | trim + '<|eot|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|head|>assistant<|/head|>\n\n' }}
{%- endif %}
""",
    "thoughts are dropped": """\
{%- set ns = namespace(last=messages|length - 1, found=false) %}
{%- for message in messages[::-1] %}
    {%- if not ns.found and message.role == "user" and not message.content.startswith('<tool>') %}
        {%- set ns.found = true %}{%- set ns.last = (messages|length - 1) - loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == "assistant" and '</think>' in content and loop.index0 < ns.last %}
        {%- set content = content.split('</think>')[-1].lstrip('\n').rstrip() %}
    {%- endif %}
    {{- '<|im_start|>' ~ message.role ~ '\n' ~ content ~ '<|im_end|>' ~ '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>' }}{%- endif %}
{%- endif %}""",
    "strict turns": """\
{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}{% set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- set user_messages = loop_messages | selectattr("role", "equalto", "user") | list %}
{%- set kept = [] %}
{%- for m in loop_messages %}{% if m.role not in ["tool"] and not m.get("tool_calls") %}
{%- set kept = kept + [m] %}{% endif %}{% endfor %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if (message["role"] == "user") != (loop.index0 % 2 == 0) %}
        {{- raise_exception("Roles must alternate user/assistant!") }}
    {%- endif %}
    {%- if message["role"] == "user" %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\n\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- elif message["role"] == "assistant" %}
        {{- " " + message["content"]|trim + eos_token }}
    {%- endif %}
{%- endfor %}""",
    "a macro, a block of text, statements on lines of their own": """\
{% macro turn(role, text) %}
<|head|>{{ role | title }}<|/head|>{{ text }}{{ eos_token }}
{% endmacro %}
{% for message in messages %}
  {% if loop.index > 40 %}{% break %}{% endif %}
  {% set text %}{{ message.content | replace('\r', '') }} {{ loop.revindex }}{% endset %}
  {% generation %}
{{ turn(message.role, text) }}
  {% endgeneration %}
{% endfor %}
{{ messages | map(attribute='role') | join(', ') }} {{ messages | tojson }} {{ [1, none] | string }}
{{ dict(b=1, a=[2.5, true])|items|list }} {{ {'k': (1, 2)} }} {{ missing }} {{ 7 // 2 * 3 % 5 }}
{{ tools }} {{ 'a-b'.split('-') | reverse | join('+') }} {{ messages[0].content[:3] | upper }}
""",
}

texts = st.text(
    st.sampled_from("ab曹操,.!< \n\t\r😀0|") | st.characters(exclude_categories=("Cs",))
).filter(lambda text: "s>" not in text and "|>" not in text)  # no special string
roles = st.tuples(st.booleans(), st.integers(1, 5)).map(
    lambda how: ["system"] * how[0] + ["user", "assistant", "user", "assistant", "user"][: how[1]]
)


def chats(content: st.SearchStrategy[str] = texts) -> st.SearchStrategy[Chat]:
    def messages(roles: Sequence[str]) -> st.SearchStrategy[Chat]:
        contents = st.lists(content, min_size=len(roles), max_size=len(roles))
        return contents.map(
            lambda words: [{"role": r, "content": c} for r, c in zip(roles, words, strict=True)]
        )

    return roles.flatmap(messages)


def wrapped(backend: Backend) -> Any:
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=BOS, eos_token=EOS, extra_special_tokens=SPECIALS[2:]
    )


def encoder(backend: Backend) -> Callable[[str], list[int]]:
    backend = Backend.from_str(backend.to_str())
    backend.encode_special_tokens = True
    return lambda text: backend.encode(text, add_special_tokens=False).ids


def added(backend: Backend) -> Backend:
    backend.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in SPECIALS])
    return backend


@pytest.fixture(scope="module")
def backend(tokenizer: BPETokenizer, tmp_path_factory: pytest.TempPathFactory) -> Backend:
    folder = tmp_path_factory.mktemp("bpe")
    tokenizer.save(folder)
    return added(Backend.from_file(str(folder / "tokenizer.json")))


@pytest.fixture(scope="module")
def theirs(backend: Backend) -> Any:
    return wrapped(backend)


@pytest.fixture(scope="module")
def ids_of(backend: Backend) -> Callable[..., list[int]]:
    encode, ids = encoder(backend), {name: backend.token_to_id(name) for name in SPECIALS}
    return lambda template, messages, **how: chat_ids(
        template, messages, encode, ids, bos=BOS, eos=EOS, **how
    )


@pytest.mark.parametrize("name", TEMPLATES)
@settings(max_examples=40)
@given(messages=chats())
def test_equal_transformers(
    name: str, messages: Chat, theirs: Any, ids_of: Callable[..., list[int]]
) -> None:
    template = TEMPLATES[name]
    for prompt in (True, False):
        how = {"chat_template": template, "add_generation_prompt": prompt, "tokenize": False}
        text = render(template, messages, bos=BOS, eos=EOS, add_generation_prompt=prompt)
        assert text == theirs.apply_chat_template(messages, **how)
    expected = theirs.apply_chat_template(
        messages, chat_template=template, add_generation_prompt=True
    )
    assert ids_of(template, messages) == expected["input_ids"]


pieces = st.sampled_from(["a", " ", "<", "|", "<|", "\n", "曹", "\ue000", "</think>", *SPECIALS])


@pytest.mark.parametrize("name", TEMPLATES)
@settings(max_examples=40)
@given(messages=chats(st.lists(pieces, max_size=8).map("".join)))
def test_special_strings_in_messages_stay_text(
    name: str, messages: Chat, theirs: Any, backend: Backend, ids_of: Callable[..., list[int]]
) -> None:
    """The text is the same, and only the template's own special tokens are ids."""
    template = TEMPLATES[name]
    ids = ids_of(template, messages)
    text = theirs.apply_chat_template(
        messages, chat_template=template, add_generation_prompt=True, tokenize=False
    )
    assert theirs.decode(ids) == text
    special = set(map(backend.token_to_id, SPECIALS))
    sanitized = theirs.apply_chat_template(
        messages, chat_template=template, add_generation_prompt=True, sanitize_control_tokens=True
    )
    assert [i for i in ids if i in special] == [i for i in sanitized["input_ids"] if i in special]


def test_special_strings_that_overlap_or_are_one_character() -> None:
    special = {"ab": 500, "bc": 501, "<": 502, "<s>": 503}
    messages = [{"role": "user", "content": "abc<s><ab"}]
    template = "ab{{ messages[0].content }}<{{ messages[0].content | trim }}bc<s>"
    text = [*b"abc<s><ab"]
    ids = chat_ids(template, messages, lambda t: [*t.encode()], special, bos=None, eos=None)
    assert ids == [500, *text, 502, *text, 501, 503]


@pytest.mark.parametrize("first_only", [False, True])
@settings(max_examples=60)
@given(messages=chats(st.text(st.sampled_from("ab  曹\n.▁"), min_size=1)), name=st.sampled_from(
    ["chatml", "strict turns", "thoughts are dropped"]
))  # fmt: skip
def test_sentencepiece_style(first_only: bool, messages: Chat, name: str) -> None:
    """A dummy prefix before every text (Llama 2), or before the first only (TinyLlama)."""
    theirs, encode, later = sentencepiece(first_only)
    ids = {name: theirs.convert_tokens_to_ids(name) for name in SPECIALS}
    ours = chat_ids(
        TEMPLATES[name], messages, encode, ids, bos=BOS, eos=EOS, encode_later=later
    )  # fmt: skip
    expected = theirs.apply_chat_template(
        messages, chat_template=TEMPLATES[name], add_generation_prompt=True
    )
    assert ours == expected["input_ids"]


def sentencepiece(first_only: bool, made: dict[bool, Any] = {}) -> Any:  # noqa: B006  # once
    if first_only not in made:
        backend = Backend(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
        trainer = trainers.BpeTrainer(
            vocab_size=400,
            special_tokens=["<unk>", *(f"<0x{i:02X}>" for i in range(256))],
            show_progress=False,
        )
        words = ["ab ba abba assistant system user tool INST You are 曹操. a b" * 3]
        backend.train_from_iterator(words, trainer)
        backend.decoder = decoders.Metaspace()
        scheme = "first" if first_only else "always"
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
        if not first_only:  # as the files of Llama 2 have it
            backend.pre_tokenizer = None
            backend.normalizer = normalizers.Sequence(
                [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
            )
        theirs = wrapped(added(backend))
        later = Backend.from_str(backend.to_str())
        if first_only:
            later.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
        made[first_only] = theirs, encoder(backend), encoder(later) if first_only else None
    return made[first_only]


def test_the_template_says_where_a_bos_stands(
    ids_of: Callable[..., list[int]], backend: Backend
) -> None:
    messages = [{"role": "user", "content": f"{BOS} hi"}]
    bos = backend.token_to_id(BOS)
    assert bos not in ids_of(CHATML, messages)
    ids = ids_of("{{ bos_token }}" + CHATML, messages)
    assert (ids.count(bos), ids[0]) == (1, bos)


HEADER = ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|begin_of_text|>"]


@given(chats(texts.map(str.strip)))
def test_llama_3_equals_its_chat_format(messages: Chat) -> None:
    """Said again after llama-models' ChatFormat: a header, the text, an end; then a header."""
    start, end, eot, bos = range(1000, 1004)
    expected = [bos]
    for message in [*messages, None]:
        role, text = (message["role"], message["content"]) if message else ("assistant", "")
        expected += [start, *role.encode(), end, *f"\n\n{text}".encode()]
        expected += [eot] if message else []
    special = dict(zip(HEADER, range(1000, 1004), strict=True))
    template = built_in_template(special)
    assert template == LLAMA_3
    encode = lambda text: [*text.encode()]  # noqa: E731
    ids = chat_ids(template, messages, encode, special, bos=HEADER[3], eos=None)
    assert ids == expected


@given(chats().filter(lambda messages: messages[-1]["role"] == "user"))
def test_llama_2_equals_chat_completion(messages: Chat) -> None:
    """Said again after Meta's chat_completion: turns encoded one by one, the system inside."""
    encode = lambda text: [999, *text.encode()]  # noqa: E731  # with a dummy prefix
    dialog = [message["content"] for message in messages]
    if messages[0]["role"] == "system":
        dialog = [
            f"<<SYS>>\n{dialog[0]}\n<</SYS>>\n\n{dialog[1]}" if len(dialog) > 1 else "",
            *dialog[2:],
        ]
    expected = []
    for prompt, answer in itertools.zip_longest(dialog[::2], dialog[1::2]):
        turn = f"[INST] {prompt.strip()} [/INST]"
        if answer is None:
            expected += [1, *encode(turn)]
        else:
            expected += [1, *encode(f"{turn} {answer.strip()} "), 2]
    ids = chat_ids(LLAMA_2, messages, encode, {BOS: 1, EOS: 2}, bos=BOS, eos=EOS)
    assert ids == expected


def test_the_built_in_format_is_the_vocabularys() -> None:
    assert built_in_template({"<|im_start|>": 1, "<|endoftext|>": 0}) == CHATML
    assert built_in_template({BOS: 1, EOS: 2, "<unk>": 0}) is None  # Llama 2's tells nothing


@pytest.mark.parametrize(
    ("template", "messages", "says"),
    [
        (LLAMA_2, ["user", "user"], "refuses these messages: after the system message, user and"),
        (LLAMA_2, ["system"], None),
        (
            TEMPLATES["strict turns"],
            ["assistant"],
            "messages: Roles must alternate user/assistant!",
        ),
    ],
)
def test_a_template_refuses_in_its_own_words(
    template: str, messages: list[str], says: str | None
) -> None:
    chat = [{"role": role, "content": "x"} for role in messages]
    if says is None:
        assert render(template, chat, bos=BOS, eos=EOS) == ""
    else:
        with pytest.raises(TokenizerError, match=says):
            render(template, chat, bos=BOS, eos=EOS)


def test_llama_2_refuses_its_own_marks_in_a_message() -> None:
    for tag in ("[INST]", "<</SYS>>"):
        with pytest.raises(TokenizerError, match="hold"):
            render(LLAMA_2, [{"role": "user", "content": f"x {tag}"}], bos=BOS, eos=EOS)


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ([], "at least one message"),
        ([{"role": "tool", "content": "x"}], "message 0 has role 'tool'"),
        ([{"role": "<|im_start|>", "content": "x"}], "has role '<|im_start|>'"),
        ([{"role": "user"}], "must have a string content"),
        ([{"role": "user", "content": None}], "must have a string content"),
        ([{"role": "user", "content": "x", "tool_calls": "y"}], "message 0 has a 'tool_calls'"),
        ([{"role": "user", "content": "x" * (1 << 20)}] * 2, "more than 1,048,576 characters"),
    ],
)
def test_messages_that_are_none(messages: Any, says: str) -> None:
    with pytest.raises(InputError) as error:
        chat_ids(CHATML, messages, lambda text: [], {}, bos=None, eos=None)
    assert says in str(error.value)


def grows(step: str, first: str = "'xxxx'", end: str = "{{ ns.a | length }}") -> str:
    loop = "{% for i in range(60) %}" + step + "{% endfor %}"
    return "{% set ns = namespace(b=1, a=" + first + ") %}" + loop + end


def nests(wrap: str, end: str = "{{ ns.a is eq(ns.b) }}") -> str:
    """A container that holds itself twice, 60 times over; small in memory, endless to walk."""
    step = wrap.replace("X", "ns.a"), wrap.replace("X", "ns.b")
    return grows("{% set ns.a = " + step[0] + " %}{% set ns.b = " + step[1] + " %}", end=end)


LARGE = "{% set ns = namespace(a='xxxx') %}{% for i in range(12) %}{% set ns.a = ns.a + ns.a %}"
LARGE += "{% endfor %}{% set large = ns.a %}"  # a text as long as the test allows

TOO_MUCH = {
    "doubles by ~": grows("{% set ns.a = ns.a ~ ns.a %}"),
    "doubles by +": grows("{% set ns.a = ns.a + ns.a %}"),
    "doubles a list by +": grows("{% set ns.a = ns.a + ns.a %}", "[1]"),
    "doubles by a macro": "{% macro m(x) %}{{ x }}{{ x }}{% endmacro %}"
    + grows("{% set ns.a = m(ns.a) %}"),
    "doubles by a block": grows("{% set x %}{{ ns.a }}{{ ns.a }}{% endset %}{% set ns.a = x %}"),
    "grows by join": LARGE + "{{ range(999) | map('string') | join(large) }}",
    "grows by join()": LARGE + "{{ large.join(range(999) | map('string')) }}",
    "grows by replace": LARGE + "{{ large | replace('x', large) }}",
    "grows by replace()": LARGE + "{{ large.replace('', large) }}",
    "nests lists": nests("[X, X]"),
    "nests tuples": nests("(X, X)", "{{ {ns.a: 1} }}"),
    "nests dicts": nests("{'a': X, 'b': X}"),
    "nests by dict()": nests("dict(a=X, b=X)"),
    "nests, and compares": nests("[X, X]", "{{ ns.a == ns.b }}"),
    "nests by a filter": nests("[X] | map('default') | list + [X]"),
    "keeps slices": LARGE + "{% for i in range(999) %}{% set a = large[1:] %}{% endfor %}",
    "keeps lists": LARGE + "{% for i in range(999) %}{% set a = range(999) | list %}{% endfor %}",
    "an endless JSON": LARGE + "{{ [large, [large, large, large, large]] | tojson }}" * 99,
    "writes much": "{% for i in range(9999) %}" + "x" * 20000 + "{% endfor %}",
    "a chain of comparisons": LARGE + "{{ large " + "== large " * 200 + "}}",
}
ENDLESS = {
    "loops without output": "{% for a in range(99999) %}{% for b in range(99999) %}"
    "{% endfor %}{% endfor %}",
    "writes little for ever": "{% for i in range(99999) %}{% if a %}x{% endif %}" * 3
    + "{% endfor %}" * 3,
    "a chain of filters": "{{ range(99999) "
    + "| map('string') | select('string') " * 20
    + "| list }}",
    "a tree of calls": "{% macro m(n) %}{% if n %}{% set a = m(n - 1) %}{% set a = m(n - 1) %}"
    "{% endif %}{% endmacro %}{{ m(60) }}",
}
HOSTILE = {
    "calls itself": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "a block calls itself": "{% block a %}{{ self.a() }}{% endblock %}",
    "writes a little too much": LARGE + "{{ large }}x",
    "repeats a text": "{{ 'a' * 9999 }}",
    "repeats a list": "{{ [1] * 9999 }}",
    "a large power": "{{ 99 ** 99 }}",
    "multiplies": grows("{% set ns.a = ns.a * ns.a %}", "9"),
    "pads by %": "{{ '%9999d' % 1 }}",
    "pads by format()": "{{ '{:>9999}'.format(1) }}",
    "pads by format_map()": "{{ '{a:>9999}'.format_map({'a': 1}) }}",
    "pads by a method": "{{ 'a'.center(9999) }}",
    "pads by a method's name": "{{ 'a'['ljust'](9999) }}",
    "pads by a filter": "{{ 'a' | center(9999) }}",
    "pads JSON": "{{ [1] | tojson(indent=9999) }}",
    "pads JSON with a text": "{{ [1] | tojson(separators=('" + " " * 999 + "', ':')) }}",
    "a range too long": "{{ range(999999999) | list }}",
    "holds itself": "{% set n = namespace() %}{% set n.n = n %}{{ n }}",
    "sums lists": "{{ [[1]] | sum(start=[]) }}",
    "deep brackets": "{{ " + "(" * 9000 + ")" * 9000 + " }}",
    "a long chain": "{{ a" + ".a" * 9000 + " }}",
    "many loops": "{% for a in b %}" * 2000,
    "deep loops": "{% for a in [1] %}" * 25 + "{% endfor %}" * 25,
    "too long": "{#" + " " * 40000 + "#}",
    "no Jinja": "{% if %}",
    "includes a file": "{% include '/etc/passwd' %}",
    "inherits": "{% extends 'x' %}",
    "changes a list": "{{ messages.append(1) }}",
    "looks inside": "{{ messages.__class__.__mro__ }}",
    "looks inside by a filter": "{{ messages | attr('__class__') }}",
    "an unknown function": "{{ lipsum(n=9999) }}",
    "divides by zero": "{{ 1 // 0 }}",
    "an endless refusal": "{{ raise_exception('x y' ~ 'z' ~ messages) }}",
}


@pytest.mark.parametrize("name", [*TOO_MUCH, *ENDLESS, *HOSTILE])
def test_a_hostile_template_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits are smaller here, to be quick; it is refused before there is much of it."""
    for limit, value in {"MAX_TEXT": 1 << 14, "_MAX_VALUE": 1 << 17, "_MAX_MADE": 1 << 19}.items():
        monkeypatch.setattr(sandbox, limit, value)
    monkeypatch.setattr(sandbox, "MAX_SECONDS", 60)
    if name in TOO_MUCH:
        tracemalloc.start()
    assert ("more than a chat needs" in refusal(name)) == (name not in HOSTILE)
    if name in TOO_MUCH:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 10e6
    if name in ENDLESS:
        monkeypatch.setattr(sandbox, "_MAX_MADE", 1 << 60)
        monkeypatch.setattr(sandbox, "MAX_SECONDS", 0.1)
        assert "it runs for more than 0.1 s" in refusal(name)


def refusal(name: str) -> str:
    with pytest.raises(TokenizerError) as error:
        render(
            (HOSTILE | TOO_MUCH | ENDLESS)[name],
            [{"role": "user", "content": "x" * 500}],
            bos=BOS,
            eos=EOS,
        )
    says = str(error.value)
    assert "\n" not in says
    assert len(says) < 400
    return says


fragments = st.sampled_from(
    """{% for m in messages %}|{% endfor %}|{% if m %}|{% else %}|{% endif %}|{{|}}|{%|%}|m|.|role|
['content']|messages|~|+|*|'x'|range(9)|(|)|[|]|,|:|{% set a = |namespace()|.a|tojson|trim|loop|
{% macro f(x) %}|{% endmacro %}|f(|{#|#}| if | is |defined|=|1|__class__|join|.join|{% break %}
""".replace("\n", "").split("|")
)


@settings(max_examples=150)
@given(st.lists(fragments, max_size=25).map("".join))
def test_any_template_is_text_or_our_error(template: str) -> None:
    try:
        render(template, [{"role": "user", "content": "x"}], bos=BOS, eos=EOS)
    except TokenizerError as error:
        assert "\n" not in str(error)  # noqa: PT017  # either outcome is fine
