from optg.cli import main

main()
