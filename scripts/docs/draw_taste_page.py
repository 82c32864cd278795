"""Draw docs/images/taste_page.png: the page of `flowgrpo taste` with images of the consistency starter, in a Chromium.

    python scripts/docs/draw_taste_page.py [FILE]
"""

import shutil
import sys
import tempfile
import threading
from pathlib import Path

from playwright.sync_api import sync_playwright

from flowgrpo.contrib.taste.votes import Question, VoteLog
from flowgrpo.data.prompts import STARTER, load_prompts
from flowgrpo.evaluation import images
from flowgrpo.tools.vote.live import LiveBallot
from flowgrpo.tools.vote.server import address, server

ROOT = Path(__file__).parents[2]
SIZE = {"width": 1000, "height": 560}


def main(file: Path) -> None:
    prompt = load_prompts(STARTER / "held_out.jsonl")[61]
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        (folder / "prompt.txt").write_text(prompt.text + "\n")
        images.sample_file("starter_consistency", folder / "prompt.txt", folder / "drawn", count=4, seed=3)
        pictures = tuple(sorted((folder / "drawn").rglob("*.png")))
        live = LiveBallot(VoteLog(folder / "votes.jsonl"), seconds=20 * 60)
        check = [Question(2, number, prompt.text, pictures[:2], check=True) for number in range(36)]
        live.ask(check)
        for number, question in enumerate(check):
            live.vote(question.name, [0, 1], "tie" if number < 6 else int((live.files(question.name)[0] == pictures[0])
                                                                          == (number > 16)))
        live.ask([Question(3, number, prompt.text, pictures) for number in range(20)])
        for number in range(7):
            live.vote(f"3.q{number}", [0, 1, 2, 3], 2)
        live.tell(updates=24, foretold={"right": 12, "of": 20})
        with server(live, 0) as serving, sync_playwright() as playwright:
            threading.Thread(target=serving.serve_forever, daemon=True).start()
            found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))))
            with playwright.chromium.launch(executable_path=found, args=["--no-sandbox"]) as browser:
                page = browser.new_page(viewport=SIZE, color_scheme="light")
                page.goto(address(serving))
                page.wait_for_function("[...document.querySelectorAll('.side img')].every(image => image.complete)")
                page.wait_for_selector(".side img.small")
                page.screenshot(path=file)
            serving.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "images" / "taste_page.png")
