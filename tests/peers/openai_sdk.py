#!/usr/bin/env python3
"""The OpenAI Python SDK against a Pawl with the mock runner: completions, chats, streams, errors.

Every answer goes through the SDK's own (pydantic) models; what they silently let through is
checked here by hand. Exits non-zero on the first surprise.
"""

import argparse

import openai
from openai import OpenAI


def completions(client: OpenAI, model: str) -> None:
    answer = client.completions.create(
        model=model, prompt="one two three", max_tokens=5, n=2, logprobs=2, temperature=0.7, seed=7,
        extra_body={"ignore_eos": True},
    )
    assert answer.object == "text_completion" and answer.id.startswith("cmpl-"), answer
    assert [c.index for c in answer.choices] == [0, 1], answer
    assert all(c.finish_reason == "length" for c in answer.choices), answer
    assert all(len(c.logprobs.tokens) == 5 for c in answer.choices), answer
    assert all(len(c.logprobs.top_logprobs[0]) >= 2 for c in answer.choices), answer
    assert answer.usage.completion_tokens == 10, answer.usage
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 10, answer.usage

    several = client.completions.create(model=model, prompt=["a", "b"], max_tokens=2)
    assert [c.index for c in several.choices] == [0, 1], several


def completion_stream(client: OpenAI, model: str) -> None:
    whole = client.completions.create(
        model=model, prompt="stream me", max_tokens=8, temperature=0, extra_body={"ignore_eos": True}
    )
    events = list(client.completions.create(
        model=model, prompt="stream me", max_tokens=8, temperature=0, stream=True,
        stream_options={"include_usage": True}, extra_body={"ignore_eos": True},
    ))
    text = "".join(e.choices[0].text for e in events if e.choices)
    reasons = [e.choices[0].finish_reason for e in events if e.choices and e.choices[0].finish_reason]
    assert text == whole.choices[0].text, (text, whole.choices[0].text)
    assert reasons == ["length"], reasons
    assert events[-1].choices == [] and events[-1].usage.completion_tokens == 8, events[-1]
    assert all(e.usage is None for e in events[:-1]), "usage only in the last chunk"


def chat(client: OpenAI, model: str) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Say something."}]},
    ]
    answer = client.chat.completions.create(
        model=model, messages=messages, max_completion_tokens=6, logprobs=True, top_logprobs=3,
        extra_body={"ignore_eos": True},
    )
    choice = answer.choices[0]
    assert answer.object == "chat.completion" and answer.id.startswith("chatcmpl-"), answer
    assert choice.message.role == "assistant" and choice.finish_reason == "length", choice
    assert len(choice.logprobs.content) == 6, choice.logprobs
    assert all(len(t.top_logprobs) == 3 for t in choice.logprobs.content), choice.logprobs

    events = list(client.chat.completions.create(
        model=model, messages=messages, max_tokens=6, stream=True, n=2, temperature=0,
        extra_body={"ignore_eos": True},
    ))
    assert {e.choices[0].index for e in events} == {0, 1}, events
    roles = [e.choices[0].delta.role for e in events if e.choices[0].delta.role]
    assert roles == ["assistant", "assistant"], roles
    ends = sorted((e.choices[0].index, e.choices[0].finish_reason)
                  for e in events if e.choices[0].finish_reason)
    assert ends == [(0, "length"), (1, "length")], ends

    # The SDK's helper puts the pieces together, and raises where an answer was cut short.
    stopping = {"allowed_token_ids": [300, 301], "stop_token_ids": [301]}
    with client.chat.completions.stream(
        model=model, messages=messages, max_tokens=200, extra_body=stopping
    ) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].finish_reason == "stop", final
    with client.chat.completions.stream(
        model=model, messages=messages, max_tokens=4, extra_body={"ignore_eos": True}
    ) as stream:
        try:
            stream.get_final_completion()
            raise AssertionError("an answer cut short looks whole")
        except openai.LengthFinishReasonError:
            pass


def expect(error, call, *words: str) -> None:
    try:
        call()
    except error as raised:
        text = str(raised)
        assert all(word in text for word in words), f"{words} are not all in: {text}"
        assert raised.body and "message" in raised.body and "type" in raised.body, raised.body
        return
    raise AssertionError(f"expected {error.__name__} for {words}")


def errors(client: OpenAI, model: str) -> None:
    create = client.completions.create
    expect(openai.NotFoundError, lambda: create(model="nope", prompt="x"), "nope")
    expect(openai.BadRequestError, lambda: create(model=model, prompt=""), "prompt")
    expect(openai.BadRequestError, lambda: create(model=model, prompt="x", temperature=-1), "temperature")
    expect(openai.BadRequestError, lambda: create(model=model, prompt="x", n=100000), "n")
    expect(openai.BadRequestError, lambda: create(model=model, prompt="x", logprobs=1000), "logprobs")
    long = [5] * 20_000
    expect(openai.BadRequestError, lambda: create(model=model, prompt=long), "20000")
    expect(openai.BadRequestError,
           lambda: client.chat.completions.create(model=model, messages=[]), "messages")


def cancelled(client: OpenAI, model: str) -> None:
    stream = client.completions.create(
        model=model, prompt="to be left", max_tokens=400, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    stream.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base-url", required=True)
    args = parser.parse_args()
    client = OpenAI(base_url=args.base_url, api_key="none", max_retries=0, timeout=30)
    models = client.models.list()
    model = models.data[0].id
    assert client.models.retrieve(model).id == model
    for case in (completions, completion_stream, chat, errors, cancelled):
        case(client, model)
        print("ok", case.__name__, flush=True)


if __name__ == "__main__":
    main()
