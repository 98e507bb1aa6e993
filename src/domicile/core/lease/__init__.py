"""May this process act, and is that one dead?"""
