"""Packages that do not fit, and names of their inside that the package uses."""

import ast
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

from flowgrpo import packages
from flowgrpo.errors import UserError


def install(folder: Path, name: str, version: str, code: str | None = None) -> None:
    """Put a distribution with one module into a folder of packages; without code, its record alone."""
    record = folder / f"{name}-{version}.dist-info"
    record.mkdir(parents=True)
    (record / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (record / "top_level.txt").write_text(name)
    if code is not None:
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text(code)


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A command in an interpreter that finds the folder's packages first."""
    code = f"import sys; sys.path.insert(0, {str(folder)!r}); from flowgrpo.cli import main; " \
        "sys.exit(main(sys.argv[1:]))"
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)


@pytest.mark.fast
def test_this_environment_fits_and_old_packages_are_named(tmp_path):
    assert packages.require_versions() is None
    install(tmp_path / "site-packages", "peft", "0.11.0")
    done = run(tmp_path / "site-packages", "list", "methods")
    [line] = done.stderr.splitlines()
    assert done.returncode == 2
    assert line.startswith(f"flowgrpo: error: flowgrpo {packages.__version__} does not work with peft 0.11.0") and \
        "pip install 'peft>=" in line


@pytest.mark.parametrize("found, fits", [("2.8.0a0+ab12cd", True), ("2.8.1+cu128", True), ("2.7.1", False)])
def test_a_vendors_build_counts_as_its_release(found, fits):
    from packaging.requirements import Requirement
    assert packages._fits(Requirement("torch>=2.8"), found) == fits


PEFT = "from transformers import NoSuchCache\n"
TORCHAO = "from torch.utils import _pytree\n_pytree.no_such_function(int)\n"


@pytest.mark.parametrize("name, code, told", [
    ("peft", PEFT, f"peft 99.0 does not work with transformers {packages.version('transformers')} .*NoSuchCache.*"
                   "pip install --upgrade peft transformers$"),
    ("torchao", TORCHAO, "torchao 99.0 does not work with torch.*pip uninstall torchao")])
def test_a_package_that_does_not_import(name, code, told, tmp_path):
    """The name that peft's releases before 0.18 ask of transformers 5; an optional package may go."""
    folder = tmp_path / "site-packages"
    install(folder, name, "99.0", code)
    done = run(folder, "train", "configs/starter.yaml", f"--output={tmp_path}/runs", "--train.epochs=1")
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert re.search(told, done.stderr.splitlines()[-1])


def failed(folder: Path, monkeypatch, name: str, code: str) -> BaseException:
    """The error of an import of a package that lies in a folder of packages, or of its function `load`."""
    install(folder / "site-packages", name, "99.0", code)
    monkeypatch.syspath_prepend(str(folder / "site-packages"))
    monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.raises((ImportError, AttributeError)) as raised:
        __import__(name).load()
    return raised.value


def test_what_a_library_raises_in_its_place_is_looked_behind(tmp_path, monkeypatch):
    error = RuntimeError("Failed to import diffusers.pipelines (look up to see its traceback):")
    error.__cause__ = failed(tmp_path, monkeypatch, "oddpackage", "from torch import no_such_name\n")
    told = packages.import_failure(error)
    assert told.startswith(f"oddpackage 99.0 does not work with torch {packages.version('torch')} (cannot import name")
    assert told.endswith("pip install --upgrade oddpackage torch")


@pytest.mark.parametrize("code, told", [
    ("import torch\ntorch.no_such_function()\n", "^oddpackage 99.0 does not work with torch .*no_such_function"),
    ("import no_such_module\n", r"^oddpackage 99.0 lacks no_such_module \(No module named 'no_such_module'\): "
                                "pip install no_such_module"),
    # As transformers' `load_adapter` asks peft 0.18.
    ("def load():\n    from torch import no_such_name\n", "pip install --upgrade oddpackage torch$")])
def test_an_attribute_a_requirement_or_a_name_that_is_gone(code, told, tmp_path, monkeypatch):
    assert re.search(told, packages.import_failure(failed(tmp_path, monkeypatch, "oddpackage", code)))


def test_what_transformers_wants_of_peft():
    told = packages.import_failure(ValueError("The version of PEFT you are using is not compatible, please use a "
                                              "version >= 0.22.0"))
    assert told == (f"transformers {packages.version('transformers')} wants peft >= 0.22.0, and peft "
                    f"{packages.version('peft')} is here: pip install 'peft>=0.22.0', or "
                    f"'transformers<{packages.version('transformers')}'")


def test_other_errors_are_not_explained():
    for bug in (lambda: None.no_such_attribute, lambda: __import__("no_such_module_at_all"), lambda: int("x")):
        with pytest.raises(Exception) as raised:
            bug()
        assert packages.import_failure(raised.value) is None


def test_an_extra_that_does_not_fit_is_told_for_what_needs_it(tmp_path, monkeypatch):
    failed(tmp_path, monkeypatch, "resvg_py", "import torch\ntorch.no_such_function()\n")
    with pytest.raises(UserError, match=r"^reward 'svg': resvg.py 99.0 does not work with torch .*: pip install"):
        packages.import_optional("resvg_py", "svg", "reward 'svg'")


PACKAGE = Path(__file__).parents[1] / "flowgrpo"
LIBRARIES = {"diffusers", "transformers", "peft", "accelerate"}

# Names of a module, as `from MODULE import NAME`.
IMPORTED = [(module, name) for module, names in {
    "accelerate.commands.accelerate_cli": "main",
    "accelerate.utils": "broadcast_object_list set_seed",
    "diffusers.image_processor": "VaeImageProcessor",
    "diffusers.loaders.single_file_utils": "fetch_diffusers_config is_clip_model_in_single_file is_t5_in_single_file",
    "diffusers.models.attention_dispatch": "attention_backend",
    "diffusers.models.autoencoders.vae": "DiagonalGaussianDistribution",
    "diffusers.models.normalization": "MochiRMSNorm RMSNorm",
    "diffusers.modular_pipelines": "PipelineState SequentialPipelineBlocks",
    "diffusers.pipelines.kolors.text_encoder": "ChatGLMConfig ChatGLMModel",
    "diffusers.pipelines.kolors.tokenizer": "ChatGLMTokenizer",
    "diffusers.pipelines.ltx2": "LTX2TextConnectors",
    "diffusers.pipelines.ltx2.vocoder": "LTX2Vocoder",
    "diffusers.utils": "convert_state_dict_to_diffusers convert_unet_state_dict_to_peft logging",
    "diffusers.utils.torch_utils": "randn_tensor",
    "peft.functional": "delete_adapter get_peft_model_state_dict inject_adapter_in_model set_peft_model_state_dict",
    "peft.tuners.lora": "LoraLayer",
    "peft.tuners.tuners_utils": "BaseTunerLayer",
    "peft.utils.other": "get_pattern_key",
    "transformers.modeling_layers": "GradientCheckpointingLayer",
    "transformers.models.auto": "modeling_auto",
    "transformers.models.blip.modeling_blip": "BlipVisionModel",
    "transformers.models.blip.modeling_blip_text": "BlipTextModel",
    "transformers.models.qwen2_vl.image_processing_qwen2_vl": "smart_resize",
    "transformers.models.t5gemma.modeling_t5gemma": "T5GemmaEncoder",
    "transformers.utils": "logging"}.items() for name in names.split()]

# Class, attribute of it or of its instances, and the file that reads it.
ATTRIBUTES = [
    ("diffusers.models.transformers.transformer_flux:FluxAttnProcessor", "_attention_backend",
     "policies/pipelines/attention.py"),
    ("diffusers:DiffusionPipeline", "_execution_device", "policies/pipelines/call.py"),
    ("diffusers:FluxPipeline", "_lora_loadable_modules", "policies/weights/lora_files.py"),
    ("diffusers:FluxPipeline", "_pack_latents", "policies/pipelines/image_latents.py"),
    ("diffusers:FluxTransformer2DModel", "_cp_plan", "policies/pipelines/attention.py"),
    ("diffusers:FluxTransformer2DModel", "_hf_peft_config_loaded", "policies/weights/adapters.py"),
    ("diffusers:FluxTransformer2DModel", "_keep_in_fp32_modules", "tools/dry_run/from_configs.py"),
    ("diffusers:FluxTransformer2DModel", "_supports_gradient_checkpointing", "policies/weights/checkpointing.py"),
    ("transformers:PreTrainedModel", "_from_config", "tools/dry_run/from_configs.py"),
    ("transformers:PreTrainedModel", "_hf_peft_config_loaded", "policies/weights/adapters.py"),
    ("transformers:PreTrainedModel", "_keep_in_fp32_modules", "tools/dry_run/from_configs.py")]

FORBIDDEN = {"add_adapter", "set_adapter", "disable_adapters", "enable_adapters", "active_adapters",
             "get_adapter_state_dict", "delete_adapter"}  # of transformers, whose minimum of peft moves by itself


def trees():
    return {file: ast.parse(file.read_text(encoding="utf-8")) for file in sorted(PACKAGE.rglob("*.py"))}


def borrowed() -> dict[tuple[str, str], str]:
    """The names that the package imports from below a library's top level, with a file that does so."""
    found = {}
    for file, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and "." in (node.module or "") and \
                    node.module.partition(".")[0] in LIBRARIES:
                found |= {(node.module, alias.name): str(file.relative_to(PACKAGE)) for alias in node.names}
            if isinstance(node, ast.Import):
                found |= {(alias.name, ""): str(file.relative_to(PACKAGE)) for alias in node.names
                          if "." in alias.name and alias.name.partition(".")[0] in LIBRARIES}
    return found


def test_lists_are_complete_and_no_method_touches_an_adapter():
    assert sorted(borrowed()) == sorted(IMPORTED)
    # `enable_adapters` and `set_adapter` of peft's own layers are called with the layer.
    for file, tree in trees().items():
        called = {node.func.attr for node in ast.walk(tree) if isinstance(node, ast.Call)
                  and isinstance(node.func, ast.Attribute)
                  and not (isinstance(node.func.value, ast.Name) and node.func.value.id == "layer")}
        assert not called & FORBIDDEN, f"{file}: {called & FORBIDDEN}"


@pytest.mark.parametrize("module, name", IMPORTED, ids=lambda each: each)
def test_a_borrowed_name_exists(module, name):
    there = hasattr(importlib.import_module(module), name)
    assert there, f"{module} has no {name} any more: flowgrpo/{borrowed()[module, name]} uses it"


@pytest.mark.parametrize("owner, name, file", ATTRIBUTES)
def test_a_borrowed_attribute_exists(owner, name, file):
    library, _, kind = owner.partition(":")
    assert name in (PACKAGE / file).read_text(encoding="utf-8"), f"{file} uses {name} no more: leave it out here"
    assert hasattr(getattr(importlib.import_module(library), kind), name), f"{owner} has no {name}: {file} uses it"
