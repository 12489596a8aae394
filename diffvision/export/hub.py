"""`diffvision push`: check a model's folder and upload it to the Hugging Face Hub.

huggingface_hub's `upload_folder` uploads, and retries if the connection fails.
"""

from pathlib import Path
from typing import Any

from diffvision.models.files import FOLDER

SENT = (".json", ".safetensors", ".md", ".png", ".txt", ".model", ".onnx", ".data")  # tensors, text and pictures
_CODE = "modeling_diffvision.py"  # the one line by which transformers finds our classes


def push(model: str, repo_id: str, *, private: bool = False, message: str = "Add the model") -> None:
    """Send a model's folder to the Hugging Face Hub, after a check that needs no connection.

    Args:
        model: a folder that `diffvision export` or a host wrote: it must load, and hold nothing but tensors, text and
            pictures.
        repo_id: OWNER/NAME; made if it does not exist.
        private: make the repository private; a public one that exists is an error.
        message: of the commit.

    Raises:
        FileNotFoundError, ValueError: the folder does not load or has files of other kinds, there is no token, or
            repo_id is not a valid name.
        ConnectionError: the Hub cannot be reached or refuses the upload; the message has the reason.
    """
    from diffvision.export.finite import check_finite
    from diffvision.opening import open_model

    folder = Path(model.removeprefix(FOLDER))
    files = files_of(folder)
    api, endpoint = _client(repo_id)  # before the model is loaded
    opened = open_model(folder)
    check_finite(opened, folder)
    total = sum((folder / file).stat().st_size for file in files)
    print(f"{folder} is {opened.name}: {len(files)} files, {total / 1e6:,.1f} MB, go to {endpoint}/{repo_id}")
    try:
        made = str(api.create_repo(repo_id, private=private, repo_type="model", exist_ok=True).repo_id)
        if private and not api.repo_info(made).private:
            raise ValueError(f"{made} exists already and is public: make it private on the Hub first, or name another")
        api.upload_folder(repo_id=made, folder_path=str(folder), commit_message=message, allow_patterns=files)
    except ValueError:
        raise
    except Exception as error:  # raised by huggingface_hub, its HTTP client or the operating system
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConnectionError(f"{endpoint} did not take {repo_id}: {first}") from error
    print(f"sent: {endpoint}/{made}")


def files_of(folder: str | Path) -> list[str]:
    """Return the names of the files that would be sent.

    Raises:
        FileNotFoundError, ValueError: as `push`; that the model loads is not checked.
    """
    path = Path(folder)
    if not path.is_dir():
        raise FileNotFoundError(f"no folder {str(folder)!r}: give one that `diffvision export` wrote")
    inside = sorted(file for file in path.rglob("*") if file.is_symlink() or not file.is_dir())
    names = [file.relative_to(path).as_posix() for file in inside]
    if links := [name for name, file in zip(names, inside, strict=True) if file.is_symlink()]:
        raise ValueError(f"{folder} has links ({', '.join(links[:3])}), which may lead anywhere: put the files there")
    if foreign := [name for name in names if not _is_sent(name)]:
        raise ValueError(
            f"{folder} holds {', '.join(foreign[:3])} ({len(foreign)} files), of kinds that are not sent, such as "
            f"pickles, which could run code where they are loaded: keep {', '.join(SENT)}"
        )
    if "README.md" not in names:
        raise ValueError(f"{folder} has no README.md, the model card: write one, or export the folder again")
    return names


def _is_sent(name: str) -> bool:
    hidden = any(part.startswith(".") for part in name.split("/"))
    return name == _CODE or (name.endswith(SENT) and not hidden)


def _client(repo_id: str) -> tuple[Any, str]:
    """Return the Hub's client with the user's token, and its address, without a request."""
    import huggingface_hub
    from huggingface_hub import constants
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise ValueError(f"repo_id is {repo_id!r}, no name of a repository (OWNER/NAME): {error}") from None
    if constants.HF_HUB_OFFLINE:
        raise ValueError("HF_HUB_OFFLINE is set: nothing can be sent; unset it to push")
    token = huggingface_hub.get_token()
    if token is None:
        raise ValueError("no token of the Hugging Face Hub: log in with `hf auth login`, or set HF_TOKEN")
    return huggingface_hub.HfApi(token=token), constants.ENDPOINT
