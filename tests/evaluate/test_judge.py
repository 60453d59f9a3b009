"""The judge against a server of our own: replies, retries, refusals, and the order of answers."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from scipy import stats
from toy import toy, write_lines

import gpt2llama as g
from gpt2llama.errors import InputError
from gpt2llama.evaluate.judge import (
    Comparisons,
    Exchange,
    Grades,
    Judge,
    JudgeError,
    compare_all,
    grade_all,
)
from gpt2llama.evaluate.shares import Share

Reply = tuple[int, str, dict[str, str]]  # status, body, headers


class Server(ThreadingHTTPServer):
    """Keeps the requests; `reply` makes an answer of a request's body."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: list[tuple[str, dict[str, str], Any]] = []
        self.reply: Callable[[Any], Reply] = lambda body: says("[[7]]")
        self.lock = threading.Lock()

    def handle_error(self, *_: Any) -> None:
        """A client that did not wait is no error."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.asked.append((self.path, dict(self.headers), body))
            status, text, headers = self.server.reply(body)
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: Any) -> None:
        pass


def says(content: str) -> Reply:
    body = {"choices": [{"message": {"role": "assistant", "content": content}}]}
    return 200, json.dumps(body), {}


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def judge_at(server: Server, **how: Any) -> Judge:
    return Judge(server.url, "a-judge", "the-key", wait=0.001, **how)


def test_what_is_sent_and_read(server: Server) -> None:
    exchange = Exchange(question="什么是 RoPE？{x}", answer="旋转", reference="按位置旋转")
    server.reply = lambda body: says("Fine: [[3]] or rather\n[[10]]")
    assert judge_at(server).grade(exchange) == 10
    path, headers, body = server.asked[0]
    assert path == "/v1/chat/completions"
    assert headers["Authorization"] == "Bearer the-key"
    assert (body["model"], body["temperature"]) == ("a-judge", 0)
    (message,) = body["messages"]
    for text in ("什么是 RoPE？{x}", "旋转", "按位置旋转", "[[5]]"):
        assert text in message["content"]
    server.reply = lambda body: says("It is [[11]] of 10")
    assert judge_at(server).grade(exchange) is None
    full = Judge(server.url + "/chat/completions/", "m")
    full.grade(exchange)
    assert server.asked[-1][0] == "/v1/chat/completions"
    assert "Authorization" not in server.asked[-1][1]


@pytest.mark.parametrize("status", [429, 500, 503])
def test_it_tries_again(server: Server, status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    waits = list[float]()
    monkeypatch.setattr("gpt2llama.evaluate.judge.time.sleep", waits.append)
    header = {"Retry-After": "7"}
    server.reply = lambda body: (
        (status, "busy", header if len(server.asked) == 3 else {})
        if len(server.asked) < 4
        else says("[[4]]")
    )
    judge = Judge(server.url, "m", wait=0.5)
    assert judge.grade(Exchange(question="q", answer="a")) == 4
    assert waits == [0.5, 1.0, 7.0]
    server.reply = lambda body: (status, "busy\nnow", {})
    with pytest.raises(JudgeError, match=rf"not answer in 5 tries \(HTTP {status} .*busy now\)"):
        judge.ask("x")
    assert len(server.asked) == 9


def test_it_does_not_where_that_cannot_help(server: Server) -> None:
    server.reply = lambda body: (401, '{"error": "bad key"}', {})
    with pytest.raises(JudgeError, match=r"refused: HTTP 401 .*bad key"):
        judge_at(server).ask("x")
    assert len(server.asked) == 1
    server.reply = lambda body: (302, "", {"Location": server.url + "/elsewhere"})
    with pytest.raises(JudgeError, match="refused: HTTP 302"):  # the key goes nowhere else
        judge_at(server).ask("x")
    assert len(server.asked) == 2


@pytest.mark.parametrize("body", ["hello", "{}", '{"choices": []}', "[1]", "\xff", "[" * 10000])
def test_a_reply_that_is_none(server: Server, body: str) -> None:
    server.reply = lambda _: (200, body, {})
    with pytest.raises(JudgeError, match="no chat completion; is it an OpenAI-compatible API"):
        judge_at(server).ask("x")


def test_nobody_there(server: Server) -> None:
    server.reply = lambda _: (200, "x" * ((1 << 20) + 5), {})
    with pytest.raises(JudgeError, match="more than 1 MB"):
        judge_at(server).ask("x")
    # Port 9 of this machine discards, or refuses at once.
    with pytest.raises(JudgeError, match=r"not answer in 2 tries \(.+\); is it running"):
        Judge("http://127.0.0.1:9/v1", "m", tries=2, wait=0.001, timeout=0.5).ask("x")
    for url in ("file:///etc/passwd", "127.0.0.1/v1", "http://", "http://["):
        with pytest.raises(InputError, match="must be http"):
            Judge(url, "m")
    for key in ("a\nb", "钥匙"):
        with pytest.raises(InputError, match="plain ASCII in one line"):
            Judge("http://127.0.0.1/v1", "m", key)


def test_a_slow_one_times_out(server: Server) -> None:
    waiting = threading.Event()

    def slow(body: Any) -> Reply:
        waiting.wait(5)
        return says("[[1]]")

    server.reply = slow
    with pytest.raises(JudgeError, match=r"in 2 tries \(.*timed out"):
        judge_at(server, timeout=0.05, tries=2).ask("x")
    waiting.set()


def placed(better: str) -> Callable[[Any], Reply]:
    """A judge who likes the answer that has `better` in it."""

    def reply(body: Any) -> Reply:
        text = body["messages"][0]["content"]
        first = text.partition("=== answer A ===")[2].partition("=== answer B ===")[0]
        return says("[[A]]" if better in first else "[[B]]")

    return reply


def test_the_order_does_not_decide(server: Server) -> None:
    exchanges = [Exchange(question=f"q{i}", answer="good", other="poor") for i in range(6)]
    server.reply = placed("good")
    assert compare_all(judge_at(server), exchanges).verdicts == [("first", "first")] * 6
    assert len(server.asked) == 12
    server.reply = placed("poor")
    assert compare_all(judge_at(server), exchanges).verdicts == [("second", "second")] * 6
    server.reply = lambda body: says("[[A]]")  # always the first place
    found = compare_all(judge_at(server), exchanges)
    assert found.verdicts == [("first", "second")] * 6
    values = found.to_dict()
    assert values["order_decides"] == values["ties"]["count"] == 6
    assert values["wins"]["count"] == values["losses"]["count"] == 0


def test_the_figures() -> None:
    verdicts: Any = [("first", "first")] * 5 + [("first", "tie"), (None, "tie"), ("tie", "tie")]
    values = Comparisons([*verdicts, ("second", "second")]).to_dict()
    assert (values["compared"], values["unread"], values["order_decides"]) == (8, 1, 0)
    assert values["wins"] == Share(5, 8).to_dict()
    assert values["ties"] == Share(2, 8).to_dict()
    values = Grades([3, None, 5, 10]).to_dict()
    assert (values["graded"], values["unread"], values["mean"]) == (3, 1, 6)
    wanted = stats.t.interval(0.95, 2, 6, stats.sem([3, 5, 10]))
    assert (values["low"], values["high"]) == pytest.approx(wanted)
    assert Grades([None]).to_dict() == {"graded": 0, "unread": 1}


def test_an_error_stops_all(server: Server) -> None:
    server.reply = lambda body: (400, "no", {})
    with pytest.raises(JudgeError, match="HTTP 400"):
        grade_all(judge_at(server), [Exchange(question="q", answer="a")] * 50)
    assert len(server.asked) < 50


def test_the_command(
    run: Any, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "from-the-environment")
    for seed in (3, 4):
        g.save(*toy(seed), tmp_path / f"m{seed}")
    tasks = write_lines(tmp_path / "t.jsonl", [{"prompt": "注意力"}, {"prompt": "token"}])
    how = ("eval", tmp_path / "m3", "--tasks", tasks, "-n", 5,
           "--judge", server.url, "--judge-model", "j")  # fmt: skip
    got = json.loads(run(*how, "--json")[0])["judge"]
    assert got == {"model": "j", "graded": 2, "unread": 0, "mean": 7, "low": 7, "high": 7}
    assert server.asked[0][1]["Authorization"] == "Bearer from-the-environment"
    assert "judged by j: 7.00 of 10" in run(*how)[0]
    server.reply = lambda body: says("[[B]]")
    against = ("--against", tmp_path / "m4")
    got = json.loads(run(*how, *against, "--json")[0])["judge"]
    assert (got["compared"], got["order_decides"]) == (2, 2)
    assert "2 of 2 went to a place" in run(*how, *against)[0]
    server.reply = lambda body: (403, "no", {})
    said = run(*how, code=1)[1]
    assert "refused: HTTP 403" in said
    assert said.count("gpt2llama:") == 1
