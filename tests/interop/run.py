#!/usr/bin/env python3
"""Runs vLLM's own frontends against our core, beside our frontends.

    tests/interop/run.py [--pawl target/release/pawl] [--model MODEL.gguf] [--only NAME]

See README.md in this folder. The exit status is 0 when every check held.
"""

import argparse
import datetime
import pathlib
import platform
import subprocess
import sys
import time
import traceback

import checks_death
import checks_serving
from lab import Failed, VLLM, bounded, fetch_vllm_rs, make_lab

ROOT = pathlib.Path(__file__).resolve().parents[2]
CHECKS = checks_serving.CHECKS + checks_death.CHECKS


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--pawl", type=pathlib.Path, default=ROOT / "target/release/pawl")
    parser.add_argument("--model", help="GGUF file [default: the default model]")
    parser.add_argument("--vllm-rs", type=pathlib.Path, help="the program, instead of fetching it")
    parser.add_argument("--vllm-python", help="an interpreter that has vLLM, instead of vllm-rs")
    parser.add_argument("--cache", type=pathlib.Path, default=ROOT / "target/interop")
    parser.add_argument("--only", action="append", help="name of a check; may be repeated")
    parser.add_argument("--keep", action="store_true", help="keep the logs")
    parser.add_argument("--timeout", type=int, default=900, help="seconds for all of it")
    args = parser.parse_args()
    pawl, vllm_rs = args.pawl.resolve(), None
    if not args.vllm_python:
        vllm_rs = (args.vllm_rs or fetch_vllm_rs(args.cache)).resolve()
    model = args.model or output(pawl, "model", "fetch", "--print-path")
    model = pathlib.Path(model).resolve()
    bounded(args.timeout)
    theirs = "vLLM in Python" if args.vllm_python else f"vllm-rs {VLLM}"
    print(f"{datetime.date.today()}, {output(pawl, '--version')}, {theirs}, {model.name},")
    print(f"{platform.system()} {platform.release()} {platform.machine()}\n", flush=True)
    print("| check | result | seconds |\n|---|---|---|", flush=True)
    failed = 0
    # How frontends of vLLM's live and die on our core does not depend on what they are written in.
    checks = checks_serving.CHECKS if args.vllm_python else CHECKS
    for name, run in checks:
        if args.only and name not in args.only:
            continue
        started = time.monotonic()
        try:
            with make_lab(pawl, vllm_rs, args.vllm_python, model, args.keep) as lab:
                subprocess.run(
                    [pawl, "model", "export-hf", model, lab.hf], check=True, timeout=60,
                    stdout=subprocess.DEVNULL,
                )
                notes = run(lab) or []
            result = "; ".join(["held", *notes])
        except Exception as error:
            failed += 1
            result = f"FAILED: {error}".replace("|", "\\|").replace("\n", " ")
            if not isinstance(error, Failed):
                traceback.print_exc()
        seconds = time.monotonic() - started
        print(f"| {name} | {result} | {seconds:.1f} |", flush=True)
    sys.exit(1 if failed else 0)


def output(*argv):
    done = subprocess.run(argv, check=True, capture_output=True, text=True, timeout=1800)
    return done.stdout.strip()


if __name__ == "__main__":
    main()
