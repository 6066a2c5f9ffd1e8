"""Lead `import optg` to the package if the working directory is the parent folder of a clone.

There Python takes the clone, a folder called optg, for the package itself. Without this file it would find an empty one.
"""

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

if __name__ == "optg":
    package = Path(__file__).parent / "optg"
    spec = spec_from_file_location("optg", package / "__init__.py", submodule_search_locations=[str(package)])
    assert spec and spec.loader
    sys.modules["optg"] = module_from_spec(spec)
    spec.loader.exec_module(sys.modules["optg"])
