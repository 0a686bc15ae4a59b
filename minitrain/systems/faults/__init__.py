"""Failures, made on purpose and found.

chaos        a plan of faults in one line, injected at named points of a real run
"""
