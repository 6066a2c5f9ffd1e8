"""The trainers import torchvision if it is installed."""

import logging

from tests.torchvision_import import import_torchvision

import_torchvision()
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
