from .stub import *
