"""`eagle-pangu doctor`: whether this machine can serve, what is missing, and what could not be looked at.

Small checks, each with one result. What needs no torch comes first, since torch itself may not be importable here.
"""
