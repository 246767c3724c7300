"""Makes the goldens in this folder with other software than Pawl; see README.md.

    python make.py MODEL.gguf [tokenizer] [greedy] [perplexity]

Without names, all of them. Needs torch, transformers, gguf and xllamacpp. The forward pass is
transformers' Llama in float32 over the dequantised weights; token ids come from llama.cpp's
tokenizer and are checked against the Hugging Face one that transformers rebuilds from the same file.
"""

import json
import math
import pathlib
import sys
import unicodedata
import urllib.request

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

HERE = pathlib.Path(__file__).parent
STEPS = 64
LOGITS_FOR = ["river", "rust", "digits", "chat_hello"]


def load_model(path):
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(
        str(path.parent), gguf_file=path.name, dtype=torch.float32
    )
    # The file says 9.99e-06, a float32 that lost its last digits on the way through a config file.
    assert abs(model.config.rms_norm_eps - 1e-5) < 1e-9, model.config.rms_norm_eps
    for layer in model.model.layers:
        layer.input_layernorm.variance_epsilon = 1e-5
        layer.post_attention_layernorm.variance_epsilon = 1e-5
    model.model.norm.variance_epsilon = 1e-5
    assert next(model.parameters()).dtype == torch.float32
    return model.eval()


def load_tokenizer(path):
    from tokenizers import pre_tokenizers

    tokenizer = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    # The rebuilt tokenizer lacks this model's split of digits into single ones.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    return tokenizer


class LlamaCpp:
    """llama.cpp's server on loopback, for its tokenizer."""

    def __init__(self, path):
        import xllamacpp

        params = xllamacpp.CommonParams()
        params.model.path = str(path)
        params.n_ctx = 512
        params.cpuparams.n_threads = 1
        self.server = xllamacpp.Server(params)
        self.address = self.server.listening_address

    def encode(self, text):
        body = json.dumps({"content": text, "add_special": False, "parse_special": True})
        request = urllib.request.Request(
            self.address + "/tokenize", body.encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request) as answer:
            return json.load(answer)["tokens"]


@torch.inference_mode()
def greedy(model, prompt):
    """The next STEPS greedy tokens, each with the gap between its logit and the runner-up's."""
    steps, cache, first_row = [], None, None
    ids = torch.tensor([prompt])
    for _ in range(STEPS):
        out = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache = out.past_key_values
        row = out.logits[0, -1]
        first_row = row if first_row is None else first_row
        top = torch.topk(row, 2)
        token = int(top.indices[0])
        steps.append([token, round(float(top.values[0] - top.values[1]), 4)])
        ids = torch.tensor([[token]])
    return steps, first_row


def statistics(row):
    """What a kernel builder wants to know of one row of logits."""
    top = torch.topk(row, 10)
    return {
        "top": [[int(i), round(float(v), 4)] for i, v in zip(top.indices, top.values)],
        "mean": round(float(row.mean()), 5),
        "std": round(float(row.std()), 5),
        "min": round(float(row.min()), 4),
        "logsumexp": round(float(torch.logsumexp(row, 0)), 4),
    }


def awkward_strings():
    """Over 200 strings that tokenizers get wrong."""
    strings = [
        "", " ", "  ", "   ", " " * 7, " " * 100, "\n", "\n\n", "\n\n\n", " \n", "\n ", "\t",
        "\t\t",
        "\r", "\r\n", "\r\n\r\n", "a\r\nb", "a\n b", "a \nb", "a  \n  b", " a", "a ", "  a", "a  ",
        "  a  b  ", "\ta", "a\t", "a\tb", "\n\ta", "    if x:\n        return\n", "\u00a0",
        "a\u00a0b",
        "\u3000", "\u2003x", "\u200b", "\u200bx", "\u200d", "\ufeff", "\ufeffabc", "\x00", "a\x00b",
        "\x00\x00", "\x01\x02\x1b[0m", "\x7f", "\x85", "\u2028", "a\u2028b", "\u2029", "\x0b\x0c",
        "Hello, world!", "Hello,world", "HELLO", "hello", "Hello", " Hello", "hELLO wORLD",
        "don't", "I'll we've they're you'd I'm it's", "DON'T I'LL", "can’t", "'s", "'", "''", "'S",
        " 's", "x's'y", "'tis", "rock'n'roll", "`code`", "\"quoted\"", "(parens)", "[x](y)", "{}",
        "0", "1", "10", "123", "1234567890", "3.14159", "1,000,000", "1e10", "0x1F", "12:34:56",
        "2026-11-30", "v1.2.3", "a1b2c3", "1a", "a1", " 1", "1 ", " 12 34 ", "½", "²³", "①②", "٣٤٥",
        "१२३", "１２３", "Ⅷ", "一二三", "99 bottles", "-1", "+1", "1/2", "50%", "$100", "#1", "№5",
        "é", "e\u0301", "café", "cafe\u0301", "naïve", "Ångström", "A\u030a", "ñ", "ß", "ẞ", "İ",
        "ı",
        "ﬁ", "ǅ", "Zürich", "a\u0300\u0301\u0302", "\u0301", " \u0301", "q\u0323\u0307", "Việt Nam",
        "日本語", "日本語のテキスト", "中文字符", "中文 English 混合", "한국어", "안녕하세요", "가",
        "สวัสดี", "ภาษาไทย", "น้ำ", "हिन्दी", "नमस्ते", "বাংলা", "தமிழ்", "العربية",
        "مرحبا بالعالم",
        "عَرَبِيّ", "עברית", "שָׁלוֹם", "ελληνικά", "Привет, мир!", "Ёлка", "українська", "ქართული",
        "አማርኛ", "ᏣᎳᎩ", "𐍈", "𝕳𝖊𝖑𝖑𝖔", "𠀀𠀁", "꧁꧂",
        "😀", "😀😀", "a😀b", " 😀", "👍🏽", "👨‍👩‍👧‍👦", "🏳️‍🌈", "🇫🇷", "🇫🇷🇩🇪", "☃", "☃️", "❤️", "©®™",
        "→←", "∑∫√",
        "“quotes”", "—", "–", "…", "...", "....", "!!!", "?!", "!?!?!?", "---", "===", "***", "___",
        "//", "/* c */", "<!-- x -->", "<p>", "</p>", "&amp;", "a_b_c", "camelCaseWord",
        "snake_case",
        "foo.bar(baz)", "x==y", "x=>y", "a->b", "C++", "C#", "#include <stdio.h>", "@user", "a@b.c",
        "https://example.org/a?b=c&d=1#e", "C:\\path\\n", "\\n", "\\u00e9", "$x^2$", "~/x",
        "<|endoftext|>", "<|im_start|>", "<|im_start|>user", "<|im_start|> user",
        " <|im_start|>", "a<|im_end|>b", "<|im_end|>\n", "<|im_start|>user\nHi<|im_end|>\n",
        "<|im_start", "|im_start|>", "<|im_start|><|im_end|>", "<|IM_START|>", "<file_sep>",
        "<jupyter_code>",
        "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa", "ab" * 40, "xyz" * 21,
        "the the the the", "Donaudampfschifffahrtsgesellschaft", "antidisestablishmentarianism",
        "ÿ", "ÿþ", "Ġ", "Ċ", "ĠĠ", "▁", "▁a", "\ufffd", "\ufffe", "\U0010ffff", "\u0378",
    ]  # fmt: skip
    assert len(set(strings)) == len(strings)
    return strings


def write(name, value):
    """One array element a line, so that a changed golden shows in a diff."""
    lines = ",\n".join(json.dumps(item, ensure_ascii=True) for item in value)
    (HERE / name).write_text(f"[\n{lines}\n]\n")


@torch.inference_mode()
def perplexity(model, llama):
    """How unexpected each token of the text is after those before it, in nats."""
    text = (HERE / "perplexity.txt").read_text()
    ids = llama.encode(text)
    logits = model(input_ids=torch.tensor([ids])).logits[0].double()
    logprobs = torch.log_softmax(logits, dim=-1)
    nats = [-float(logprobs[at, token]) for at, token in enumerate(ids[1:])]
    print(len(ids), "tokens, perplexity", math.exp(sum(nats) / len(nats)))
    # The first token has nothing before it.
    write("perplexity.json", list(zip(ids, [None] + [round(n, 5) for n in nats])))


def tokenizer_goldens(tokenizer, llama):
    goldens = []
    for text in awkward_strings():
        ids = llama.encode(text) if text else []
        others = tokenizer.encode(text, add_special_tokens=False)
        if ids != others:
            name = "".join(f"{unicodedata.category(c)} " for c in text)
            print(f"tokenizers disagree on {text!r} ({name}): {ids} {others}")
        goldens.append({"text": text, "ids": ids, "agreed": ids == others})
    print(len(goldens), "strings,", sum(g["agreed"] for g in goldens), "agreed")
    write("tokenizer.json", goldens)


def greedy_goldens(model, tokenizer, llama):
    runs, rows = [], []
    for prompt in json.loads((HERE / "prompts.json").read_text()):
        text = prompt.get("text")
        if text is None:
            text = tokenizer.apply_chat_template(
                prompt["messages"], tokenize=False, add_generation_prompt=True
            )
        ids = llama.encode(text)
        assert ids == tokenizer.encode(text, add_special_tokens=False), text
        steps, row = greedy(model, ids)
        tokens = [token for token, _ in steps]
        print(prompt["name"], repr(tokenizer.decode(tokens)))
        run = {"name": prompt["name"], "text": text, "prompt_ids": ids, "steps": steps}
        if "messages" in prompt:
            run["messages"] = prompt["messages"]
        runs.append(run)
        if prompt["name"] in LOGITS_FOR:
            rows.append({"name": prompt["name"], "prompt_ids": ids, **statistics(row)})
    write("greedy.json", runs)
    write("logits.json", rows)


def main():
    path = pathlib.Path(sys.argv[1]).resolve()
    wanted = set(sys.argv[2:]) or {"tokenizer", "greedy", "perplexity"}
    tokenizer, llama, model = load_tokenizer(path), LlamaCpp(path), load_model(path)
    if "tokenizer" in wanted:
        tokenizer_goldens(tokenizer, llama)
    if "greedy" in wanted:
        greedy_goldens(model, tokenizer, llama)
    if "perplexity" in wanted:
        perplexity(model, llama)


if __name__ == "__main__":
    main()
