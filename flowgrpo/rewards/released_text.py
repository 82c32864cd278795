"""Texts that released models were trained on: VideoAlign's instruction and UnifiedReward's questions, in their words.

The texts are their authors' work and no part of this package. `flowgrpo reward fetch NAME` copies them from the
repositories that hold them, at fixed commits, into the user's cache. A released source is parsed and never run: the
string of the expected SHA-256 is taken from it, with f-strings' names in braces. No other text is accepted.
"""

import ast
import hashlib
import os
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from flowgrpo.errors import UserError, nearest
from flowgrpo.storage import atomic

BYTES, SECONDS = 2**20, 30  # of a fetched source, until a server answers


@dataclass(frozen=True)
class Released:
    """A string in a source of a public repository.

    path: of the source. sha256: of the string in UTF-8. licence: of the repository.
    """

    repository: str
    commit: str
    path: str
    sha256: str
    licence: str = "MIT"

    @property
    def url(self) -> str:
        return f"https://raw.githubusercontent.com/{self.repository}/{self.commit}/{self.path}"

    @property
    def file(self) -> Path:
        caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        return caches / "flowgrpo" / f"text-{self.sha256[:16]}.txt"


def _unified_reward(path: str, sha256: str) -> Released:
    return Released("CodeGoat24/UnifiedReward", "ff6f520247a2d36e2aff7b2ba53a935afd437f66",
                    f"inference_qwen/{path}_generation.py", sha256)


# By reward, then by what it judges.
TEXTS = {
    "videoalign": {
        "video": Released("KwaiVGI/VideoAlign", "219ab9db64c045e5181a2202d11f686439351292", "prompt_template.py",
                          "fdb6309bac618dd0c8b1b589d3a0970a974f7856eecbb355a190b2dce54af700")},
    "unified_reward": {
        "image": _unified_reward("image_generation/qwen_point_score_image",
                                 "f56f919ce3bc6aab3c173a5f836defe195e17e9614753e8b4c3dc2405bd4975b"),
        "video": _unified_reward("video_generation/qwen_point_score_video",
                                 "514a6343388979f80886656c5cb7d05f2286f2c837f5d1e1435ae0daf00ece68")},
    "unified_reward_pairs": {
        "image": _unified_reward("image_generation/qwen_pair_rank_image",
                                 "0fd2f5c43a06516503fde3e64ffc98fff6f3a8815b5eac8dc5f0d81cee686614"),
        "video": _unified_reward("video_generation/qwen_pair_rank_video",
                                 "c76ba521846dcdd36e30046c8ceac18840cb6b0ad5f5a7bc731102b2267f2db9")},
}


def texts(reward: str, option: str) -> dict[str, str]:
    """Fetched texts of a reward by what they judge: image or video. option: its argument that takes another text.
    Raises UserError for a text that is not in the cache, or was changed there."""
    found = {}
    for kind, released in TEXTS[reward].items():
        content = released.file.read_bytes() if released.file.is_file() else b""
        if digest(content) != released.sha256:
            raise UserError(f"reward {reward!r} asks in the words of {released.repository}, which are not on this "
                            f"machine: `flowgrpo reward fetch {reward}` copies them ({released.licence}), or give a "
                            f"text as args: {{{option}: FILE.txt}}")
        found[kind] = content.decode("utf-8")
    return found


def fetch(reward: str, folder: Path | None = None) -> list[Released]:
    """Copy a reward's texts into the cache, from its repository or from a clone of it in `folder`; return them.
    Raises UserError for a reward without one, a source that cannot be read and one without the expected text."""
    if reward not in TEXTS:
        raise UserError(f"no text belongs to the reward {reward!r}{nearest(reward, list(TEXTS))}")
    for released in TEXTS[reward].values():
        place = released.url if folder is None else str(folder / released.path)
        source = _source(place, released)
        known = [text for text in strings(source) if digest(text.encode("utf-8", "surrogatepass")) == released.sha256]
        if not known:
            raise UserError(f"{place} has no string of SHA-256 {released.sha256[:16]}...: expected the file of "
                            f"{released.repository} at commit {released.commit[:10]}: check that one out")
        atomic.write_bytes(released.file, known[0].encode("utf-8"), shared=True)
    return list(TEXTS[reward].values())


def _source(place: str, released: Released) -> str:
    try:
        if "://" not in place:
            return Path(place).read_text(encoding="utf-8")
        with urllib.request.urlopen(place, timeout=SECONDS) as answer:
            return bytes(answer.read(BYTES)).decode("utf-8")
    except (OSError, ValueError) as error:
        raise UserError(f"{place} cannot be read ({' '.join(str(error).split())[:160]}): clone {released.repository} "
                        "on a machine with a network, and give the folder by --source") from None


def strings(source: str) -> Iterator[str]:
    """Yield a Python source's strings, its f-strings with each expression in braces; none where it does not parse."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        elif isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else f"{{{ast.unparse(part.value)}}}"
                          for part in node.values if isinstance(part, (ast.Constant, ast.FormattedValue)))


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
