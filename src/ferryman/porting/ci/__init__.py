"""CI in which what was not tested never looks green (docs/ci.md): a matrix, its runs, their records, one gate."""
