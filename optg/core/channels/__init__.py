"""Channels that are removed together, and models without them."""

from optg.core.channels.find import coupled_channels
from optg.core.channels.groups import Group, Member
from optg.core.channels.shrink import shrink

__all__ = ["Group", "Member", "coupled_channels", "shrink"]
