"""Upload of a finished run to a model hub: the card, its images, the weights and the configuration."""

import glob
from pathlib import Path
from typing import Any

from flowgrpo import hub
from flowgrpo.errors import UserError
from flowgrpo.escaped import line
from flowgrpo.evaluation.report.verdict import untrained_lines
from flowgrpo.export.export import CARD, COMFYUI, card, load_finished
from flowgrpo.storage.places import CONFIG

# Uploaded files: below the run's folder, and below folders of weights.
TOP = (CARD, CONFIG, "summary.json", "metrics.jsonl", "curves.png", "before_after.png", "before_after.webp",
       "before_after.mp4", "adapter_config.json", "*.safetensors", f"{COMFYUI}/*.safetensors",
       "images/*.png", "images/*.webp", "images/*.mp4")
PARTS = ("unet", "transformer*", "text_encoder*", "model")
OF_PARTS = ("*.safetensors", "*.safetensors.index.json", "config.json", "adapter_config.json")
OF_MODELS = ("generation_config.json", "tokenizer*", "special_tokens_map.json", "*.jinja", "vocab.json", "merges.txt")


def files(run: Path) -> list[Path]:
    """Files of a run's folder that are uploaded, relative to it, in order; no links."""
    patterns = [*TOP, *(f"{part}/{name}" for part in PARTS for name in OF_PARTS),
                *(f"model/{name}" for name in OF_MODELS)]
    chosen = {path for pattern in patterns for path in run.glob(pattern)}
    return sorted(path.relative_to(run) for path in chosen
                  if path.is_file() and not path.is_symlink() and not path.parent.is_symlink())


def prepare(run: Path, repository: str) -> list[Path]:
    """Write the run's card, print what the run did not train, and return the files to upload.

    Raises UserError for a malformed name, and for an unfinished run.
    """
    require_name(repository)
    for sentence in untrained_lines(load_finished(run)[1]):
        print(line(sentence), flush=True)
    card(run, repository)
    return files(run)


def require_name(repository: str) -> None:
    """Raise UserError if a name is not OWNER/NAME as a hub takes it."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(repository)
        well_formed = repository.count("/") == 1
    except HFValidationError:
        well_formed = False
    if not well_formed:
        raise UserError(f"{repository!r}: expected OWNER/NAME, of letters, digits, '-', '_' and '.', such as "
                        "me/my-lora")


def push(run: Path, repository: str, private: bool = False, revision: str | None = None, message: str | None = None
         ) -> str:
    """Upload a finished run and return the commit's address. Credentials are those that huggingface_hub stores.

    revision: branch, which is made if there is none. message: of the commit.
    Raises UserError for a malformed name, without a network or a login, and if the hub refuses.
    """
    from huggingface_hub import HfApi, constants, get_token

    require_name(repository)
    load_finished(run)
    if constants.HF_HUB_OFFLINE or not hub.answers(constants.ENDPOINT):
        why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else f"{constants.ENDPOINT} does not answer"
        raise UserError(f"the upload to {repository} needs a network ({why}); --dry-run lists the files")
    if not get_token():
        raise UserError(f"the upload to {repository} needs a login: `hf auth login`, or the variable HF_TOKEN")
    sent = [glob.escape(path.as_posix()) for path in prepare(run, repository)]
    api: Any = HfApi()
    try:
        api.create_repo(repository, private=private, exist_ok=True)
        if revision is not None:
            api.create_branch(repository, branch=revision, exist_ok=True)
        return str(api.upload_folder(repo_id=repository, folder_path=run, allow_patterns=sent, revision=revision,
                                     commit_message=message or f"Upload {run.resolve().name}"))
    except Exception as error:  # the network and its libraries can raise anything
        said = hub.refusal(error, repository) or " ".join(str(error).split())[:200] or type(error).__name__
        raise UserError(f"the upload to {repository} failed: {said}") from None
