"""Loaded before pytest's plugins: nbval brings jsonschema, which without this builds 38 grammars of addresses
in every process, 2 seconds of a processor, for formats that no notebook has."""

import sys

sys.modules.setdefault("rfc3987_syntax", None)
