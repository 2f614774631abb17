#!/usr/bin/env python3
"""Checks who includes whom: folders are layers, and a folder sees only itself and the layers above it in LEVELS.
Third-party headers have one home each. Prints every offence; exit status 1 if there is one."""
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]

LEVELS = [
    ["common/base", "proto"],
    ["common/config", "common/metrics", "common/text", "kernels"],
    ["common/loop"],
    ["common/rpc", "common/http", "common/transfer", "common/coll"],
    ["common/model"],
    ["common/engine"],
    ["common/handoff"],
    ["common/worker"],
    ["router", "prefill", "decode", "deploy/ctl"],
]
LEVEL = {folder: n for n, row in enumerate(LEVELS) for folder in row}

# header prefix -> folders that may include it (tests may include what they test with)
HOMES = {
    "grpc/": ["common/rpc"],
    "ucp/": ["common/transfer"],
    "ucs/": ["common/transfer"],
    "uct/": ["common/transfer"],
    "nccl": ["common/coll"],
    "cuda": ["kernels"],
    "cublas": ["kernels"],
    "uv.h": ["common/loop"],
    "zlib.h": ["common/rpc"],
    "llhttp": ["common/http"],
    "openssl/": ["common/http"],
    "pcre2.h": ["common/text"],
    "xxhash.h": ["common/base", "common/text", "common/model", "common/engine"],
    "jansson.h": ["common/text", "common/model", "common/http", "router", "deploy/ctl"],
}
# What the router must never be linked with; its own folder must not see them either (levels say so already for most).
ROUTER_NEVER = ["kernels", "common/transfer", "common/coll"]

INCLUDE = re.compile(r'^\s*#\s*include\s+([<"])([^>"]+)[>"]', re.M)
FROM_ROOT = ("common/", "kernels/", "router/", "prefill/", "decode/", "deploy/", "proto/", "tests/")


def folder_of(path: str):
    for depth in (2, 1):
        name = "/".join(path.split("/")[:depth])
        if name in LEVEL:
            return name
    return None


def check(path: pathlib.Path, offences: list) -> None:
    rel = path.relative_to(ROOT).as_posix()
    folder = folder_of(rel)
    is_test = rel.startswith("tests/")
    text = path.read_text(encoding="utf-8")
    includes = INCLUDE.findall(text)
    for quote, name in includes:
        def bad(why: str) -> None:
            offences.append(f"{rel}: includes {name}: {why}")

        for prefix, homes in HOMES.items():
            if quote == "<" and name.startswith(prefix) and not is_test and folder not in homes:
                bad(f"only {', '.join(homes)} may")
        if quote == "<":
            continue
        if not name.startswith(FROM_ROOT):
            bad("write the path from the root")
            continue
        if not (ROOT / name).exists() and not name.startswith("proto/"):
            bad("no such file")
        target = folder_of(name)
        if is_test or target is None or folder is None or target == folder:
            if name.startswith("tests/") and not is_test:
                bad("tests are for tests")
            continue
        if LEVEL[target] >= LEVEL[folder]:
            bad(f"{target} (level {LEVEL[target]}) is not above {folder} (level {LEVEL[folder]})")
        if folder == "router" and target in ROUTER_NEVER:
            bad("the router has no device code and no transfer")
        if name.endswith("_int.h"):
            bad("internal headers are for their own folder")
    if rel.endswith(".c") and not is_test:
        own = rel[:-2] + ".h"
        first = next((n for q, n in includes if q == '"'), None)
        if (ROOT / own).exists() and first != own:
            offences.append(f"{rel}: its first include must be its own header {own}")


def main() -> int:
    offences = []
    files = [p for top in ("common", "kernels", "router", "prefill", "decode", "deploy", "tests")
             for p in sorted((ROOT / top).rglob("*")) if p.suffix in (".c", ".h", ".cu", ".cuh", ".def") and p.is_file()]
    for path in files:
        check(path, offences)
    for line in offences:
        print(line)
    print(f"layers: {len(files)} files, {len(offences)} offences")
    return 1 if offences else 0


if __name__ == "__main__":
    sys.exit(main())
