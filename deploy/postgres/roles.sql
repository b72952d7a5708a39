-- Roles and schemas of the platform; run once per database as an administrator that may create roles (no superuser needed
-- afterwards). Repeating it changes nothing. Passwords are set apart from this file: alter role ... password.
--   <schema>_owner   owns the schema, runs migrations
--   <schema>_api     HTTP: row level security by tenant
--   <schema>_system  workers: an explicit policy lets them see every tenant
-- The limits end what hangs: a statement that runs away, a transaction whose process is stopped while it holds row locks.
do $$
declare
  service text;
  suffix text;
begin
  foreach service in array array['crm', 'chessboard'] loop
    foreach suffix in array array['owner', 'api', 'system'] loop
      if not exists (select from pg_roles where rolname = service || '_' || suffix) then
        execute format('create role %I login nosuperuser nocreatedb nocreaterole nobypassrls', service || '_' || suffix);
      end if;
    end loop;
    execute format('alter role %I set statement_timeout = %L', service || '_api', '15s');
    execute format('alter role %I set idle_in_transaction_session_timeout = %L', service || '_api', '15s');
    execute format('alter role %I set statement_timeout = %L', service || '_system', '60s');
    execute format('alter role %I set idle_in_transaction_session_timeout = %L', service || '_system', '60s');
    execute format('create schema if not exists %I', service);
    execute format('alter schema %I owner to %I', service, service || '_owner');
  end loop;
end
$$;
