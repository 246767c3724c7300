"""What vLLM's frontend gets from our core, and that our frontend gets the same."""

import math

from lab import check, free_port, in_parallel, reason_of, text_of, wait_for

MESSAGES = [{"role": "user", "content": "Name three colours."}]
# Ordinary words of the default model's vocabulary. Mock answers go round in them.
SCRIPT = "2042,2043,2044,2045,2046,2047,2048,2049"


def pair(lab, *flags):
    """Our core with one frontend of each kind."""
    handshake = free_port()
    theirs = lab.vllm("vllm", handshake)
    lab.core(*flags, handshakes=[handshake])
    ours = lab.native("native")
    theirs.ready()
    ours.ready()
    return theirs, ours


def idle(server):
    """Waits until the core has nothing to do, as a frontend of ours sees it."""

    def nothing():
        now = server.metrics()
        names = ["vllm:num_requests_running", "vllm:num_requests_waiting"]
        return all(now.sum(name) == 0 for name in [*names, "vllm:kv_cache_usage_perc"])

    return wait_for("an idle core", nothing)[1]


def same_prompts(lab):
    """The exported files tokenise and template as our frontend does."""
    theirs, ours = pair(lab, "--runner", "mock")
    texts = ["Hello there", "  two\n\nlines ", "é🙂 naïve", "1234567", "\t", "<|im_end|>x"]
    for text in texts:
        counts = [s.post("/tokenize", {"prompt": text})["tokens"] for s in (theirs, ours)]
        check(counts[0] == counts[1], f"{text!r}: {counts}")
    system = [{"role": "system", "content": "Be brief."}, *MESSAGES]
    more = [*system, {"role": "assistant", "content": "Red."}, {"role": "user", "content": "More"}]
    for messages in (MESSAGES, system, more):
        used = [s.chat(messages=messages, max_tokens=1)["usage"] for s in (theirs, ours)]
        check(used[0]["prompt_tokens"] == used[1]["prompt_tokens"], f"{messages}: {used}")
    return [f"{len(texts)} texts and 3 chats"]


def answers(lab):
    """Completions and chats, whole and streamed, with every way to end."""
    theirs, ours = pair(lab, "--runner", "mock", "--mock-script", SCRIPT)
    for server in (theirs, ours):
        name = server.process.name
        whole = server.complete(prompt="a b c", max_tokens=8, temperature=0)
        choice = whole["choices"][0]
        check(choice["finish_reason"] == "length", f"{name}: {choice}")
        check(whole["usage"]["completion_tokens"] == 8, f"{name}: {whole['usage']}")
        usage = {"stream_options": {"include_usage": True}}
        events = server.stream(prompt="a b c", max_tokens=8, temperature=0, **usage).rest()
        check(text_of(events) == choice["text"], f"{name}: {text_of(events)!r} {choice!r}")
        check(events[-1] == "[DONE]" and reason_of(events) == "length", f"{name}: {events[-3:]}")
        check(events[-2]["usage"] == {**events[-2]["usage"], "completion_tokens": 8}, f"{events}")

        chat = server.chat(messages=MESSAGES, max_tokens=8, temperature=0)
        check(chat["choices"][0]["message"]["content"] == choice["text"], f"{name}: {chat}")
        path = "/v1/chat/completions"
        events = server.stream(path, messages=MESSAGES, max_tokens=8, temperature=0).rest()
        check(text_of(events) == choice["text"], f"{name}: {events}")

        words = choice["text"].split(" ")
        stopped = server.complete(prompt="a b c", max_tokens=200, stop=[words[4]])
        stopped = stopped["choices"][0]
        check(stopped["finish_reason"] == "stop", f"{name}: {stopped}")
        check(stopped["text"] == choice["text"].split(words[4])[0], f"{name}: {stopped}")

        at_token = server.complete(prompt="a b c", max_tokens=200, stop_token_ids=[2046])
        at_token = at_token["choices"][0]
        check(at_token["finish_reason"] == "stop", f"{name}: {at_token}")
        check(at_token["stop_reason"] == 2046, f"{name}: {at_token}")
        idle(ours)

        with_logprobs = server.complete(prompt="a b c", max_tokens=3, logprobs=3, temperature=0)
        logprobs = with_logprobs["choices"][0]["logprobs"]
        for token, chosen, top in zip(
            logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"]
        ):
            check(len(top) in (3, 4) and math.isclose(top[token], chosen), f"{name}: {logprobs}")
        listed = in_parallel([
            lambda n=n: server.complete(prompt=f"number {n}", max_tokens=n + 1) for n in range(20)
        ])
        counts = [answer["usage"]["completion_tokens"] for answer in listed]
        check(counts == list(range(1, 21)), f"{name}: {counts}")
    check(len(ours.complete(prompt="a", max_tokens=2, n=3)["choices"]) == 3, "n=3")
    status, answer = theirs.refusal(prompt="a", max_tokens=2, n=3)
    if lab.python:
        check(status == 200 and len(answer["choices"]) == 3, f"{status} {answer}")
        return []
    check(status == 400, f"{status} {answer}")
    return ["n > 1 is refused by vllm-rs itself"]


def end_of_text(lab):
    """The model's end is an end for both, and ignored by both when told so."""
    theirs, ours = pair(lab, "--runner", "mock", "--mock-eos-at", "3")
    for server in (theirs, ours):
        ended = server.complete(prompt="a", max_tokens=50)
        choice = ended["choices"][0]
        check(choice["finish_reason"] == "stop", f"{server.process.name}: {choice}")
        check(ended["usage"]["completion_tokens"] == 4, f"{server.process.name}: {ended}")
        goes_on = server.complete(prompt="a", max_tokens=50, ignore_eos=True)
        check(goes_on["usage"]["completion_tokens"] == 50, f"{server.process.name}: {goes_on}")
        least = server.complete(prompt="a", max_tokens=50, min_tokens=10)
        check(least["usage"]["completion_tokens"] >= 10, f"{server.process.name}: {least}")


def refusals(lab):
    """What our core cannot do is a 400 at vLLM's frontend, and harms nothing."""
    theirs, ours = pair(lab, "--runner", "mock")
    cases = {
        "structured_outputs": {"response_format": {"type": "json_object"}},
        "prompt_logprobs": {"prompt_logprobs": 1},
        "thinking_token_budget": {"thinking_token_budget": 5},
        "repetition_detection": {
            "repetition_detection": {"max_pattern_size": 3, "min_pattern_size": 1, "min_count": 2}
        },
    }
    for field, extra in cases.items():
        status, answer = theirs.refusal(prompt="a", max_tokens=2, **extra)
        check(status == 400 and field in str(answer), f"{field}: {status} {answer}")
    wrong = [
        ({"prompt": "a " * 9000, "max_tokens": 2}, 400),
        ({"prompt": [10**8], "max_tokens": 2}, 400),
        ({"prompt": "a", "max_tokens": 2, "temperature": -1}, 400),
        ({"prompt": "a", "model": "other"}, 404),
    ]
    for body, expected in wrong:
        for server in (theirs, ours):
            status, answer = server.refusal(**body)
            check(status == expected, f"{server.process.name}: {status} {str(answer)[:200]}")
    theirs.complete(prompt="a", max_tokens=2)
    idle(ours)


def sampling(lab):
    """Everything that a request may ask of the sampler, on the model: same seed, same text."""
    theirs, ours = pair(lab)
    cases = [
        {"temperature": 0},
        {"temperature": 0.8, "seed": 7},
        {"temperature": 0.8, "seed": 7, "top_p": 0.9, "top_k": 40, "min_p": 0.05},
        {"temperature": 0, "repetition_penalty": 1.3},
        {"temperature": 0, "presence_penalty": 0.5, "frequency_penalty": 0.5},
        {"temperature": 0, "logit_bias": {"2042": 100}},
        {"temperature": 0, "allowed_token_ids": [2042, 2043]},
        {"temperature": 0, "bad_words": [" the"]},
        {"temperature": 0, "min_tokens": 12},
        {"temperature": 0, "stop": [",", "."]},
        {"temperature": 0, "stop": ["."], "include_stop_str_in_output": True},
    ]
    for case in cases:
        body = {"prompt": "The capital of France is", "max_tokens": 16, **case}
        texts = [server.complete(**body)["choices"][0] for server in (theirs, ours)]
        same = texts[0]["text"] == texts[1]["text"]
        same &= texts[0]["finish_reason"] == texts[1]["finish_reason"]
        check(same, f"{case}: {texts[0]['text']!r} {texts[1]['text']!r}")
    return [f"{len(cases)} ways to sample"]


def same_text(lab):
    """The model's greedy text and its log probabilities, through either frontend."""
    theirs, ours = pair(lab)
    body = {"messages": MESSAGES, "max_tokens": 24, "temperature": 0}
    chats = [server.chat(**body) for server in (theirs, ours)]
    contents = [chat["choices"][0]["message"]["content"] for chat in chats]
    check(contents[0] == contents[1], f"{contents}")
    check(chats[0]["usage"]["total_tokens"] == chats[1]["usage"]["total_tokens"], f"{chats}")
    for server in (theirs, ours):
        events = server.stream("/v1/chat/completions", **body).rest()
        check(text_of(events) == contents[0], f"{server.process.name}: {text_of(events)!r}")
    logprobs = [
        server.chat(**body, logprobs=True, top_logprobs=3)["choices"][0]["logprobs"]["content"]
        for server in (theirs, ours)
    ]
    for one, other in zip(*logprobs, strict=True):
        check(one["token"] == other["token"], f"{one} {other}")
        check(math.isclose(one["logprob"], other["logprob"], abs_tol=1e-5), f"{one} {other}")
        check(one["bytes"] == other["bytes"], f"{one} {other}")
        tops = [[t["token"] for t in entry["top_logprobs"]] for entry in (one, other)]
        check(tops[0][:3] == tops[1][:3], f"{tops}")
    return [repr(contents[0][:40])]


def aborts(lab):
    """A client that hangs up at vLLM's frontend leaves nothing in the core."""
    theirs, ours = pair(lab, "--runner", "mock", "--mock-step-ms", "5")
    stays = theirs.stream(prompt="stays", max_tokens=300)
    stays.first()
    leavers = [theirs.stream(prompt=f"leaves {n}", max_tokens=8000) for n in range(10)]
    for leaver in leavers:
        leaver.first()
    wait_for("all to run", lambda: ours.metrics().sum("vllm:num_requests_running") == 11)
    for leaver in leavers:
        leaver.hang_up()
    _, seconds = wait_for(
        "the rest to be gone", lambda: ours.metrics().sum("vllm:num_requests_running") <= 1, 2
    )
    events = stays.rest()
    check(reason_of(events) == "length" and events[-1] == "[DONE]", f"{events[-3:]}")
    idle(ours)
    counted = theirs.metrics().sum("vllm:request_success_total", finished_reason="abort")
    # vLLM's Python frontend ends such a request without counting it.
    check(counted == (0 if lab.python else 10), f"vLLM's frontend counts {counted} aborts")
    return [f"10 requests gone after {seconds:.2f} s"]


def counters(lab):
    """For the same requests, both frontends count the same."""
    theirs, ours = pair(lab, "--runner", "mock", "--mock-script", SCRIPT)
    stop = ours.complete(prompt="a", max_tokens=8)["choices"][0]["text"].split(" ")[-1]

    def plain(server):
        for n in range(6):
            server.complete(prompt="word " * (20 * n + 1), max_tokens=3 * n + 1)
            server.chat(messages=MESSAGES, max_tokens=2)
            server.complete(prompt="x", max_tokens=50, stop_token_ids=[2044])
            server.stream(prompt="x y z", max_tokens=7).rest()

    def stopped(server):
        for n in range(6):
            server.complete(prompt="word " * (20 * n + 1), max_tokens=50, stop=[stop])

    series = 0
    for requests in (plain, stopped):
        counts = [counted(lambda s=s: requests(s), s, ours, theirs) for s in (theirs, ours)]
        differ = []
        for key in sorted(set(counts[0]) | set(counts[1]), key=str):
            name, labels = key
            one, other = (count.get(key, 0) for count in counts)
            # vLLM observes it also for frames that hold nothing but tokens after a stop string.
            late = requests is stopped and name.startswith("vllm:iteration_tokens_total_")
            if one != other and not late:
                shown = ",".join(f"{k}={v}" for k, v in sorted(labels))
                differ.append(f"{name}{{{shown}}} {one:g} theirs, {other:g} ours")
        check(not differ, "; ".join(differ))
        series += len(counts[1])
    return [f"{series} series equal"]


def counted(requests, server, ours, theirs):
    """By how much each comparable series of `server` grows with the requests."""
    # Or the second frontend would find in the core's cache what the first has left there.
    status, _ = theirs.request("POST", "/reset_prefix_cache")
    check(status == 200, f"reset_prefix_cache: {status}")
    before = server.metrics().comparable()
    requests()
    idle(ours)
    after = server.metrics().comparable()
    change = {key: value - before.get(key, 0) for key, value in after.items()}
    return {key: value for key, value in change.items() if value}


def utilities(lab):
    """The calls that vLLM's frontend makes for its developer routes."""
    theirs, ours = pair(lab, "--runner", "mock")
    wanted = [
        ("POST", "/reset_prefix_cache", None, 200),
        ("POST", "/reset_mm_cache", None, 200),
        ("POST", "/reset_encoder_cache", None, 200),
        ("GET", "/is_sleeping", None, 200),
        ("GET", "/is_paused", None, 200),
        ("POST", "/pause?mode=wait", None, 200),
        ("POST", "/v1/completions", {"model": "model", "prompt": "a", "max_tokens": 1}, 503),
        ("POST", "/resume", None, 200),
        ("POST", "/pause?mode=keep", None, 200),
        ("POST", "/resume", None, 200),
        ("POST", "/pause?mode=abort&clear_cache=true", None, 200),
        ("POST", "/resume", None, 200),
        ("POST", "/v1/completions", {"model": "model", "prompt": "a", "max_tokens": 1}, 200),
        ("POST", "/collective_rpc", {"method": "x"}, 500),
    ]
    for method, path, body, expected in wanted:
        status, answer = theirs.request(method, path, body)
        check(status == expected, f"{path}: {status} {answer}")
    missing = []
    for path in ("/sleep", "/wake_up"):
        status, _ = theirs.request("POST", path)
        if status != 200:
            missing.append(f"{path} {status}")
    check(theirs.request("GET", "/health")[0] == 200, "unhealthy after a call that failed")
    ours.complete(prompt="a", max_tokens=2)
    return [f"not done: {', '.join(missing)}"] if missing else []


CHECKS = [
    ("same prompts", same_prompts),
    ("answers", answers),
    ("end of text", end_of_text),
    ("refusals", refusals),
    ("aborts", aborts),
    ("counters", counters),
    ("utilities", utilities),
    ("same text", same_text),
    ("sampling", sampling),
]
