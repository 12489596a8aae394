"""transformers' common tests, unmodified, on our Hugging Face classes: V1, V2 and the plain Transformer.

    pip install parameterized
    pip download --no-deps --no-binary :all: transformers==5.23.0 && tar xzf transformers-5.23.0.tar.gz
    python scripts/programs/run_transformers_tests.py transformers-5.23.0        # minutes on two CPU cores

The source distribution has the tests of models; a clone of the repository has those of generation and of exporters
too. Prints how many passed, failed and were skipped for each variant, and each failure; exit status 1 if a test failed
that is not in `REFUSED`, or if one that is in it passed.
"""

import argparse
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

from shown import versions

SUITE = Path(__file__).with_name("transformers_suite.py")
# Tests that fail by design, and why: docs/guides/language.md says the same.
REFUSED = {
    "test_model_weights_reload_no_missing_tied_weights": "it loads a file without any weights; ours raises a "
    "ValueError where transformers draws the missing ones at random",
}


def run(source: Path, work: Path, chosen: str, workers: str) -> Path:
    """Run the tests; return the file of their results."""
    results = work.resolve() / "results.xml"
    command = [sys.executable, "-m", "pytest", str(SUITE), "-c", os.devnull, "--rootdir", str(SUITE.parent), "-q"]
    command += ["-p", "no:cacheprovider", "-W", "ignore", "--tb=short", "--import-mode=importlib", "-k", chosen]
    command += ["-n", workers, f"--junitxml={results}"]
    paths = [str(source.resolve()), str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH", "")]
    environment = {"PYTHONPATH": os.pathsep.join(paths), "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    with (work / "pytest.log").open("w") as log:
        subprocess.run(command, cwd=work, env={**os.environ, **environment}, stdout=log, stderr=log, check=False)
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("source", type=Path, help="transformers' source distribution, unpacked, or a clone")
    parser.add_argument("--work", type=Path, default=Path("runs/programs/transformers"), help="where results go")
    parser.add_argument("-k", dest="chosen", default="", help="which tests, as pytest's -k")
    parser.add_argument("-n", dest="workers", default="0", help="processes, as pytest-xdist's -n")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    print(versions("torch", "transformers", "diffvision"))
    results = run(args.source, args.work, args.chosen, args.workers)
    if not results.exists():
        print((args.work / "pytest.log").read_text()[-3000:])
        return 1
    counts: dict[str, Counter[str]] = {}
    wrong = []
    for case in ElementTree.parse(results).iter("testcase"):
        variant, name = case.get("classname", "").rpartition(".")[2], case.get("name", "")
        states = {"failure": "failed", "error": "failed", "skipped": "skipped"}
        # A test with parts may hold several results: skipped for one class, failed for another.
        said = {states[child.tag]: child.get("message", "") for child in case if child.tag in states}
        state = next((state for state in ("failed", "skipped") if state in said), "passed")
        counts.setdefault(variant, Counter())[state] += 1
        if state == "failed":
            first = said["failed"].partition("\n")[0]
            print(f"{variant}.{name}: {REFUSED.get(name, first)}")
        if state != "skipped" and (state == "failed") != (name in REFUSED):
            wrong.append(f"{variant}.{name} {state}")
    print("\n| variant | passed | failed | skipped |\n|---|---|---|---|")
    for variant, counted in sorted(counts.items()):
        print(f"| {variant} | {counted['passed']} | {counted['failed']} | {counted['skipped']} |")
    print(*["\nnot as expected:", *wrong] if wrong else [], sep="\n    ")
    return int(bool(wrong) or not counts)


if __name__ == "__main__":
    sys.exit(main())
