"""Which handlers have run for too long, and how does an operator end them (DX-09)?"""
