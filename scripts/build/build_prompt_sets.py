"""Write the packaged prompt sets flowgrpo/data/packaged/*.jsonl from the published files of a folder.

    python scripts/build/build_prompt_sets.py FOLDER

FOLDER holds geneval_evaluation_metadata.jsonl, t2i_compbench_*.txt, PartiPrompts.tsv, flow_grpo_ocr_test.txt,
ddpo_simple_animals.txt, dpg_bench_prompts.jsonl, unigenbench_test_prompts_en.csv and VBench_full_info.json, as their
repositories have them. A file that is missing leaves its set as it is. Sources and licences are in `sets.SETS`. The
prompts of T2I-CompBench are read by spaCy's en_core_web_sm 3.8.
"""

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from build_suites import train

from flowgrpo.contrib.questions.phrases import Phrases
from flowgrpo.data.sets import FOLDER
from flowgrpo.data.suites import load_suite


def write(name: str, rows: Iterable[dict[str, Any]]) -> None:
    """Write a set, each text once, in the order of the rows."""
    lines = {row["prompt"]: json.dumps(row, ensure_ascii=False) for row in rows}
    (FOLDER / f"{name}.jsonl").write_text("".join(line + "\n" for line in lines.values()), encoding="utf-8")
    print(f"{name}: {len(lines)} prompts")


def of_suite(path: Path) -> list[dict[str, Any]]:
    """Return the prompts of a published file, categories in the metadata."""
    rows = []
    for case in load_suite(str(path)).cases:
        names: Any = case.categories[0] if len(case.categories) == 1 else list(case.categories)
        metadata = ({"category": names} if names else {}) | case.prompt.metadata
        rows.append({"prompt": case.prompt.text} | ({"metadata": metadata} if metadata else {}))
    return rows


def compbench(folder: Path, side: str) -> list[dict[str, Any]]:
    """Return the prompts of T2I-CompBench, with what its reward would otherwise ask spaCy for.

    Noun phrases, except of prompts whose words tell them; complex prompts without their adjectives, and `action` for
    one that the benchmark lists with a place and an action.
    """
    rows = [row for file in sorted(folder.glob(f"t2i_compbench_*_{side}.txt")) for row in of_suite(file)]
    listed = (folder / f"t2i_compbench_complex_{side}_spatialaction.txt").read_text(encoding="utf-8").splitlines()
    both, phrases = {line.strip().lower().rstrip(".") for line in listed}, Phrases()
    for row in rows:
        prompt, metadata = row["prompt"], row["metadata"]
        if metadata["category"] in ("color", "shape", "texture", "numeracy", "complex"):
            metadata["noun_phrases"] = phrases.noun_phrases(prompt, {})
        if metadata["category"] == "complex":
            metadata["without_adjectives"] = phrases.without_adjectives(prompt, {})
            if prompt.lower().rstrip(".") in both:
                metadata["action"] = True
    return rows


def unigen(path: Path) -> list[dict[str, Any]]:
    rows = of_suite(path)
    return [{"prompt": row["prompt"], "metadata": {"category": row["metadata"]["category"],
                                                   "testpoints": row["metadata"]["Testpoints"]}} for row in rows]


def vbench(path: Path) -> list[dict[str, Any]]:
    rows = json.loads(path.read_text(encoding="utf-8"))
    return [{"prompt": row["prompt_en"], "metadata": {"category": row["dimension"]} | (
        {"auxiliary_info": row["auxiliary_info"]} if row.get("auxiliary_info") else {})} for row in rows]


def main(folder: Path) -> None:
    official = folder / "geneval_evaluation_metadata.jsonl"
    if official.is_file():
        held_out = [json.loads(line) for line in official.read_text(encoding="utf-8").splitlines()]
        write("geneval", held_out)
        write("geneval_train", train(held_out))
    if (folder / "t2i_compbench_color_val.txt").is_file():
        held_out = compbench(folder, "val")
        texts = {row["prompt"] for row in held_out}
        write("t2i_compbench", held_out)
        write("t2i_compbench_train", (row for row in compbench(folder, "train") if row["prompt"] not in texts))
    sources = {"partiprompts": ("PartiPrompts.tsv", of_suite), "ocr": ("flow_grpo_ocr_test.txt", of_suite),
               "simple_animals": ("ddpo_simple_animals.txt", of_suite),
               "dpg": ("dpg_bench_prompts.jsonl", of_suite), "vbench": ("VBench_full_info.json", vbench),
               "unigenbench": ("unigenbench_test_prompts_en.csv", unigen)}
    for name, (file, read) in sources.items():
        if (folder / file).is_file():
            write(name, read(folder / file))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(Path(sys.argv[1]))
