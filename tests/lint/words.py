#!/usr/bin/env python3
"""Checks the text of the tree: no unfinished marks, no tabs in sources, no trailing blanks, lines of at most 130 columns,
the wall clock in one place, every metric and flag of the tables used somewhere. Exit status 1 on an offence."""
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
# A step of the wall clock moves nothing but the time in logs: all else asks td_clock_ns.
WALL_CLOCK = re.compile(r"\bCLOCK_REALTIME\b|\bgettimeofday\b|\btime\(NULL\)|\btimespec_get\b|\buv_clock_gettime\b")
WALL_CLOCK_HOME = ("common/base/clock.c", "common/base/clock.h")
UNFINISHED = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b")
SOURCES = (".c", ".h", ".cu", ".cuh", ".def", ".py", ".proto", ".sh")


def tracked() -> list:
    out = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True)
    return [ROOT / line for line in out.stdout.splitlines()]


def rows(table: str) -> list:
    text = (ROOT / table).read_text(encoding="utf-8")
    text = re.sub(r"/\*.*?\*/", "", text, flags=re.S)
    return re.findall(r"^X\(\s*\w+\s*,\s*(\w+)", text, flags=re.M)


def main() -> int:
    offences = []
    code = {}
    for path in tracked():
        rel = path.relative_to(ROOT).as_posix()
        if path.suffix not in SOURCES or not path.is_file() or rel.startswith("tests/tiny/"):
            continue
        text = path.read_text(encoding="utf-8")
        code[rel] = text
        for n, line in enumerate(text.splitlines(), 1):
            if UNFINISHED.search(line) and not rel.startswith("tests/lint/"):
                offences.append(f"{rel}:{n}: unfinished mark")
            if WALL_CLOCK.search(line) and path.suffix in (".c", ".h") and rel not in WALL_CLOCK_HOME and not rel.startswith("tests/support/preload/"):
                offences.append(f"{rel}:{n}: the wall clock is read in common/base/clock.c only")
            if line != line.rstrip():
                offences.append(f"{rel}:{n}: blanks at the end of the line")
            if "\t" in line:
                offences.append(f"{rel}:{n}: tab")
            if len(line) > 160:
                offences.append(f"{rel}:{n}: {len(line)} columns")
    everything = "\n".join(text for rel, text in code.items() if rel.endswith((".c", ".h", ".cu")) and not rel.startswith("tests/"))
    for name in rows("common/metrics/metrics.def"):
        if not re.search(rf"\bTD_M_{name}\b", everything):
            offences.append(f"common/metrics/metrics.def: {name} is never updated")
    for name in rows("common/config/flags.def"):
        if not re.search(rf"(->|\.){name}\b", everything):
            offences.append(f"common/config/flags.def: {name} is never read")
    for line in offences:
        print(line)
    print(f"words: {len(code)} files, {len(offences)} offences")
    return 1 if offences else 0


if __name__ == "__main__":
    sys.exit(main())
