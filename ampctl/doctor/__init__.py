"""Finding what is at fault when numbers go wrong, and saying what to change.

* Before the first step: ``precision_preflight`` looks at what was built, ``dry_run`` at a pass on
  fake tensors (with ``float16_constants``); each fault is a ``finding``.
* After a bad step: ``nonfinite`` makes the diagnosis, from a ``replay`` under a ``watch``, in the
  words of ``reasons``.
* When torch raises: ``misfit`` puts it into words, ``torch_errors`` knows some by name.

``trace`` shows each operation of a pass, to the first two.
"""
