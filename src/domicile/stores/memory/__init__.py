"""The reference store, in one process's memory: what must every other store do?"""
