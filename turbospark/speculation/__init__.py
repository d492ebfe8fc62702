"""Drafting several tokens ahead and verifying them in one pass of the model.

`rounds` is the one loop, `acceptance` its laws, `stats` its figures; a drafter is any object with
the methods of `drafter.Drafter`. Knows token ids and rows of logits. Does not know text, stopping
or files.
"""
