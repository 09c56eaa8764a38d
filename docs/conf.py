"""The documentation site: ``make docs`` builds it into ``docs/_build``, with warnings as errors."""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from api_pages import write_api_pages  # beside this file; it reads the sources, and imports nothing of them

project = "meshdsl"
author = copyright = "The meshdsl developers"

extensions = ["myst_nb", "sphinx_copybutton", "sphinx_design", "fold"]  # the last beside this file
os.environ["PYTHONPATH"] = str(Path(__file__).parents[1])  # notebooks run in their own folder
nb_execution_mode = "force"  # of notebooks; tests/docs runs these, and the programs of all other pages
nb_execution_raise_on_error = True
nb_execution_timeout = 120  # seconds of a cell
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
exclude_patterns = ["jupyter_execute", "_build"]

copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

html_theme = "furo"
html_title = "meshdsl"

write_api_pages(Path(__file__).parent.parent, Path(__file__).parent / "reference" / "api")
