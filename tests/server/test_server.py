"""The OpenAI-compatible server, asked by the official client."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import httpx
import openai
import pytest

from turbospark import GenerationOptions, Runner

HI: list[Any] = [{"role": "user", "content": "hi"}]
TOOL: Any = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
GREEDY: dict[str, Any] = {"model": "model", "temperature": 0}
LONG: dict[str, Any] = {**GREEDY, "messages": HI, "stream": True, "max_tokens": 1900}


@pytest.fixture(autouse=True)
def _idle(url: str) -> Any:
    yield
    assert wait_for(lambda: not health(url)["running"] and health(url)["waiting"] == 0)


def health(url: str) -> dict[str, Any]:
    return httpx.get(url.removesuffix("/v1") + "/health").json()


def wait_for(condition: Any, seconds: float = 60) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.01)
    return False


def test_a_chat_is_answered_as_the_library_answers(client: Any, runner: Runner) -> None:
    found = client.chat.completions.create(messages=HI, max_tokens=12, **GREEDY)
    expected = runner.generate(HI, temperature=0, max_new_tokens=12, ignore_eos=True)
    assert found.choices[0].message.content == expected.text
    assert found.choices[0].finish_reason == "length" and found.object == "chat.completion"
    assert found.usage.prompt_tokens == expected.prompt_tokens
    assert found.usage.completion_tokens == 12
    assert found.usage.total_tokens == expected.prompt_tokens + 12


def test_a_stream_joins_to_the_whole_and_ends_with_its_usage(client: Any) -> None:
    whole = client.chat.completions.create(messages=HI, max_tokens=12, **GREEDY)
    chunks = list(
        client.chat.completions.create(
            messages=HI, max_tokens=12, stream=True, stream_options={"include_usage": True},
            **GREEDY,
        )
    )  # fmt: skip
    *body, last = chunks
    text = "".join(c.choices[0].delta.content or "" for c in body)
    assert text == whole.choices[0].message.content
    assert body[0].choices[0].delta.role == "assistant"
    assert body[-1].choices[0].finish_reason == "length"
    assert last.choices == [] and last.usage.completion_tokens == 12
    assert {c.id for c in chunks} == {chunks[0].id} and whole.id != chunks[0].id


@pytest.mark.parametrize("prompt", ["hello", [5, 6, 7], ["hello"]])
def test_completions_continue_texts_and_ids(client: Any, runner: Runner, prompt: Any) -> None:
    given = prompt[0] if prompt == ["hello"] else prompt
    expected = runner.generate(given, temperature=0, max_new_tokens=9, ignore_eos=True).text
    found = client.completions.create(prompt=prompt, max_tokens=9, **GREEDY)
    assert found.choices[0].text == expected
    chunks = client.completions.create(prompt=prompt, max_tokens=9, stream=True, **GREEDY)
    assert "".join(c.choices[0].text for c in chunks) == expected


def test_a_seed_and_a_stop_string_are_followed(client: Any) -> None:
    asked = {"model": "model", "messages": HI, "max_tokens": 20, "temperature": 1}
    texts = [
        client.chat.completions.create(seed=seed, **asked).choices[0].message.content
        for seed in (1, 1, 2)
    ]
    assert texts[0] == texts[1] != texts[2]
    stop = texts[0][4:6]
    found = client.chat.completions.create(seed=1, stop=[stop], **asked).choices[0]
    assert found.message.content == texts[0][: texts[0].index(stop)]
    assert found.finish_reason == "stop"


def test_conversations_continue_from_their_own_caches(client: Any) -> None:
    talks = [[{"role": "user", "content": f"talk {n} " + "x" * 60 * n}] for n in (1, 2, 3)]
    for round_ in range(2):
        for talk in talks:
            found = client.chat.completions.create(messages=talk, max_tokens=8, **GREEDY)
            if round_:
                cached = found.usage.prompt_tokens_details.cached_tokens
                assert cached > 0.6 * found.usage.prompt_tokens
            answer = {"role": "assistant", "content": found.choices[0].message.content}
            talk += [answer, {"role": "user", "content": "more"}]


def test_the_model_is_listed_and_found_by_name(client: Any) -> None:
    assert [model.id for model in client.models.list()] == ["model"]
    assert client.models.retrieve("model").owned_by == "turbospark"
    with pytest.raises(openai.NotFoundError, match="works: 'model'"):
        client.models.retrieve("other")
    with pytest.raises(openai.NotFoundError, match=r"no model 'Other'; works: 'model'$") as error:
        client.chat.completions.create(model="Other", messages=HI)
    assert error.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError, match=r"no model 'Model'.*names are case-sensitive"):
        client.chat.completions.create(model="Model", messages=HI)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"temperature": -1}, "temperature=-1"),
        ({"top_p": "x"}, "top_p='x'"),
        ({"top_p": 10**400}, "top_p=1000.* is not valid; works: a number > 0 and <= 1"),
        (
            {"messages": [{**HI[0], "x": json.loads("[" * 600 + "]" * 600)}]},
            "messages is nested too deeply",
        ),
        ({"temperature": 2.1}, "temperature=2.1 is not valid; works: 0..2"),
        ({"n": 2}, "n=2 is not supported; works: 1, or leave it out"),
        ({"logprobs": True}, "logprobs=True is not supported; works: False, or leave it out"),
        ({"logit_bias": {"5": 1}}, "logit_bias=.* is not supported"),
        ({"tool_choice": "required"}, "tool_choice='required' needs tools"),
        (
            {"tool_choice": {"type": "allowed_tools"}},
            "tool_choice=.* is not supported; works: auto",
        ),
        ({"tools": [TOOL], "parallel_tool_calls": False}, "works: .* tool_choice 'required'"),
        ({"tools": [{"name": "f"}]}, r"tools\[0\] is .*; expected"),
        ({"tools": [TOOL]}, "1 tools were given, but this model's chat template .* never reads"),
        ({"max_tokens": 0}, "max_new_tokens=0"),
        ({"extra_body": {"best": 1}}, "unknown field 'best'"),
        ({"messages": [{"role": "user"}]}, r"messages\[0\] has no content"),
        ({"messages": [5]}, r"messages\[0\] has no role"),
        ({"stream": "yes"}, "stream='yes' is not valid"),
        ({"reasoning_effort": "huge"}, "reasoning='huge'"),
        ({"stop": [5]}, "stop="),
    ],
)
def test_what_cannot_be_honoured_is_refused_in_openais_shape(
    client: Any, change: dict[str, Any], match: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=match) as error:
        client.chat.completions.create(**{**GREEDY, "messages": HI, "max_tokens": 4, **change})
    assert error.value.body["type"] == "invalid_request_error"


def test_log_probabilities_of_completions_are_refused_by_number(client: Any) -> None:
    for number in (0, 3):
        with pytest.raises(openai.BadRequestError, match=f"logprobs={number} is not supported"):
            client.completions.create(prompt="a", logprobs=number, **GREEDY)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "f"}}])
def test_a_demanded_call_is_made_whole_and_streamed(calling: Any, choice: Any) -> None:
    only = {"type": "object", "properties": {"n": {"enum": [7]}}, "required": ["n"],
            "additionalProperties": False}  # fmt: skip
    tool = {"type": "function", "function": {"name": "f", "parameters": only}}
    asked = {**GREEDY, "messages": HI, "tools": [tool], "tool_choice": choice, "max_tokens": 200}
    found = calling.chat.completions.create(parallel_tool_calls=False, **asked).choices[0]
    (call,) = found.message.tool_calls
    assert call.function.name == "f" and json.loads(call.function.arguments) == {"n": 7}
    assert found.finish_reason == "tool_calls" and found.message.content is None
    chunks = [c.choices[0] for c in calling.chat.completions.create(stream=True, **asked)]
    (delta,) = [c for chunk in chunks for c in chunk.delta.tool_calls or ()]
    assert (delta.index, delta.function.name) == (0, "f")
    assert json.loads(delta.function.arguments) == {"n": 7}
    assert chunks[-1].finish_reason == "tool_calls"
    with pytest.raises(openai.BadRequestError, match="tool_choice='g' is not an offered tool"):
        other = {"type": "function", "function": {"name": "g"}}
        calling.chat.completions.create(**{**asked, "tool_choice": other})


def test_no_call_is_made_where_none_may_be(calling: Any) -> None:
    plain = calling.chat.completions.create(**GREEDY, messages=HI, max_tokens=9)
    found = calling.chat.completions.create(
        **GREEDY, messages=HI, max_tokens=9, tools=[TOOL], tool_choice="none"
    )
    assert found.choices[0].message == plain.choices[0].message
    assert found.usage.prompt_tokens == plain.usage.prompt_tokens


def test_a_prompt_longer_than_the_context_says_so_by_its_code(client: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="exceeds max_context 2048") as error:
        client.completions.create(prompt="x" * 3000, **GREEDY)
    assert error.value.code == "context_length_exceeded"


def test_more_requests_than_may_wait_are_answered_429(client: Any, url: str) -> None:
    streams = [client.chat.completions.create(**LONG)]
    assert wait_for(lambda: health(url)["running"])
    streams += [client.chat.completions.create(**LONG) for _ in range(2)]
    assert health(url)["waiting"] == 2
    with pytest.raises(openai.RateLimitError, match="2 requests are waiting already") as error:
        client.chat.completions.create(messages=HI, **GREEDY)
    assert error.value.code == "queue_full" and error.value.response.headers["retry-after"] == "1"
    for stream in streams:
        stream.close()


def test_a_client_that_leaves_ends_its_generation(client: Any, url: str, runner: Runner) -> None:
    before = runner.phase_counters.calls
    with client.chat.completions.create(**LONG) as stream:
        next(stream)
    assert wait_for(lambda: not health(url)["running"])
    with pytest.raises(openai.APITimeoutError):
        asked = {**LONG, "stream": False, "timeout": 0.2}
        client.chat.completions.create(**asked)
    assert wait_for(lambda: not health(url)["running"])
    assert runner.phase_counters.calls - before < 2 * 1900


def test_requests_are_answered_in_turn_and_not_mixed_up(bench: Any, runner: Runner) -> None:
    found = bench["load"](runner, clients=8, seconds=2, queue_limit=4)
    assert found["wrong"] == found["lost"] == 0
    assert found["right"] >= 8 and found["fewest_answers_of_a_client"] > 0


def test_a_response_format_holds_the_answer(client: Any) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 9999}},
              "required": ["n"], "additionalProperties": False}  # fmt: skip
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    asked = {"model": "model", "messages": HI, "seed": 3, "max_tokens": 400}
    extra = {"temperature": 1, "extra_body": {"ignore_eos": False}}
    with pytest.raises(openai.BadRequestError, match="unknown field 'ignore_eos'"):
        client.chat.completions.create(response_format=form, **asked, **extra)
    with pytest.raises(openai.BadRequestError, match=r"response_format=.* is not valid"):
        client.chat.completions.create(response_format={"type": "xml"}, **asked)
    found = client.chat.completions.create(response_format=form, **asked).choices[0]
    assert set(json.loads(found.message.content)) == {"n"} and found.finish_reason == "stop"
    form = {"type": "json_object"}
    for seed in range(4):  # at random: an answer that ends is an object, a cut one begins as one
        hot = {**asked, "seed": seed, "temperature": 1}
        found = client.chat.completions.create(response_format=form, **hot).choices[0]
        text = found.message.content
        assert text.startswith("{")
        assert found.finish_reason == "length" or isinstance(json.loads(text), dict)
    bad = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"enum": []}}}
    with pytest.raises(openai.BadRequestError, match="Unsatisfiable"):
        client.chat.completions.create(response_format=bad, **asked)


# --- who may ask ----------------------------------------------------------------------------------


def test_a_key_is_asked_for_everywhere_but_for_health(bench: Any, runner: Runner) -> None:
    with bench["serving"](runner, api_key="secret") as url:
        assert health(url)["status"] == "ok"
        for key in ("x", "secre", "secret2"):
            wrong = openai.OpenAI(base_url=url, api_key=key, max_retries=0)
            with pytest.raises(openai.AuthenticationError, match="missing or wrong"):
                wrong.models.list()
        right = openai.OpenAI(base_url=url, api_key="secret")
        assert right.models.list().data[0].id == "model"


def test_pages_of_other_sites_are_turned_away(url: str) -> None:
    there = url + "/chat/completions"
    body = json.dumps({"model": "model", "messages": HI, "max_tokens": 1})
    plain = httpx.post(there, content=body, headers={"content-type": "text/plain"})
    assert plain.status_code == 415
    rebound = httpx.get(url + "/models", headers={"host": "evil.example:80"})
    assert rebound.status_code == 403
    assert "start the server with an API key" in rebound.json()["error"]["message"]


@pytest.mark.parametrize(
    ("body", "status"), [(b"{", 400), (b"[1]", 400), (b"[" * 100000, 400), (b"\xff", 400)]
)
def test_bodies_that_are_no_request_are_refused(url: str, body: bytes, status: int) -> None:
    json_type = {"content-type": "application/json"}
    found = httpx.post(url + "/completions", content=body, headers=json_type)
    assert found.status_code == status and found.json()["error"]["message"]


def test_unknown_paths_and_methods_have_the_same_shape(url: str) -> None:
    assert httpx.get(url + "/nothing").json()["error"]["message"] == "GET /v1/nothing: not found"
    assert httpx.get(url + "/completions").status_code == 405


def test_a_failure_in_the_model_is_the_servers(
    client: Any, runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    from turbospark.errors import ReadError

    def fail(*_: Any, **__: Any) -> Any:
        raise ReadError("cannot read a file")
        yield

    monkeypatch.setattr(runner, "stream", fail)
    with pytest.raises(openai.InternalServerError, match="cannot read a file"):
        client.completions.create(prompt="a", **GREEDY)
    with pytest.raises(openai.APIError, match="cannot read a file"):
        list(client.completions.create(prompt="a", stream=True, **GREEDY))


def test_threads_that_asked_are_all_answered_when_the_server_stops(
    bench: Any, runner: Runner
) -> None:
    ended: list[str] = []

    def talk(url: str) -> None:
        api = openai.OpenAI(base_url=url, api_key="x", max_retries=0)
        try:
            for _ in api.chat.completions.create(**LONG):
                pass
            ended.append("whole")
        except Exception as error:  # the client's own, or that of the transport it came with
            ended.append(type(error).__name__)

    with bench["serving"](runner, defaults=GenerationOptions(ignore_eos=True)) as url:
        threads = [threading.Thread(target=talk, args=(url,)) for _ in range(2)]
        for thread in threads:
            thread.start()
        # A connection that the server has not read from yet would be cut, not answered.
        assert wait_for(lambda: health(url)["running"] and health(url)["waiting"] == 1)
    for thread in threads:
        thread.join(20)
    assert len(ended) == 2
