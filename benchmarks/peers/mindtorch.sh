#!/bin/sh
# Make an environment in which torch's functions run on MindSpore, MSAdapter's line: sh mindtorch.sh FOLDER
# PYTHON is one for which MindSpore 2.7.0 has a wheel (3.9 to 3.11) and this package runs (3.10 and later).
set -eu
folder=${1:?"sh mindtorch.sh FOLDER"}
"${PYTHON:-python}" -m venv "$folder"
"$folder/bin/python" -m pip install mindspore==2.7.0 ml_dtypes==0.5.4 typing_extensions==4.15.0
# mindtorch needs no other library that mindnlp requires, and a real torch is not to be there.
"$folder/bin/python" -m pip install --no-deps mindnlp==0.5.1
"$folder/bin/python" -c "import mindtorch, torch; print('torch is', torch.__file__)"
