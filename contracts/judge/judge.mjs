// Lets the parser of the AsyncAPI initiative judge contract files: one line per file, and one per error or warning.
// Exit status 1 when a file has an error. Called by `make contracts`, from the folder into which npm installed the parser.
import { readFileSync } from 'node:fs';
import { basename } from 'node:path';
import { Parser } from '@asyncapi/parser';

const WORDS = ['error', 'warning'];
let failed = false;

for (const path of process.argv.slice(2)) {
  const { document, diagnostics } = await new Parser().parse(readFileSync(path, 'utf8'), { source: path });
  const name = basename(path);
  const told = diagnostics.filter(({ severity }) => severity < WORDS.length);
  const bad = document === undefined || told.some(({ severity }) => severity === 0);
  failed ||= bad;
  const extent = document && `${document.channels().length} channels, ${document.messages().length} messages`;
  console.log(`${bad ? 'refused' : 'ok'.padEnd(7)} ${name}${bad ? '' : `: ${extent}`}`);
  for (const { severity, path: place, range, message } of told) {
    const where = `${name}:${range.start.line + 1} ${place.join('.') || '(document)'}`;
    console.log(`  ${WORDS[severity]} ${where}: ${message.split('\n', 1)[0].slice(0, 300)}`);
  }
}
process.exitCode = failed ? 1 : 0;
